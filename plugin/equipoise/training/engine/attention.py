r"""Attention over packed rows, through transformers' attention interface.

Sequences of lengths :math:`L_1, \dots, L_k` are concatenated in one row; each attends only to itself, which costs
:math:`\sum_i L_i^2` scores. No mask is built: in its place, a model passes on a :class:`PackedRows`.

>>> import transformers
>>> config = transformers.LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
...     num_attention_heads=2, num_key_value_heads=1, attn_implementation=register())
>>> model = transformers.LlamaForCausalLM(config)
>>> with packed([0, 3, 5]):  # tokens 0-2 and 3-4
...     logits = model(torch.zeros(1, 5, dtype=torch.long), position_ids=torch.tensor([[0, 1, 2, 0, 1]])).logits
>>> bool(torch.equal(logits[0, 0], logits[0, 3]))
True

"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false
# transformers' attention interface is typed in part only.

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from equipoise.errors import InvalidInput, must
from equipoise.training.engine import _kernels

NAME = "equipoise_packed"
"""The ``attn_implementation`` after :func:`register`."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The sequences of a packed row.

    Args:
        lengths: tokens of each sequence, in order; at least 1 each.
        stated: whether they come from :func:`packed` instead of position ids.
    """

    lengths: tuple[int, ...]
    stated: bool = True

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InvalidInput(
                must("cu_seqlens", "rise from edge to edge", self.lengths, "pass 0 and the end of each sequence")
            )

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor | Sequence[int]) -> PackedRows:
        """From boundaries in tokens, ``(sequences + 1,)``, starting with 0.

        >>> PackedRows.of([0, 3, 5]).lengths
        (3, 2)

        """
        edges = torch.as_tensor(cu_seqlens).tolist()
        if not edges or edges[0] != 0:
            raise InvalidInput(must("cu_seqlens", "begin with 0", edges, "pass 0 and the end of each sequence"))
        return cls(lengths=tuple(end - start for start, end in itertools.pairwise(edges)))

    @property
    def num_tokens(self) -> int:
        """Tokens in the model call on this rank."""
        return sum(self.lengths)


_current: ContextVar[PackedRows | None] = ContextVar("equipoise_packed_rows", default=None)


def register() -> str:
    """Register the attention with transformers and return its name; a second call changes nothing."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, packed_mask)
    return NAME


@contextlib.contextmanager
def packed(cu_seqlens: torch.Tensor | Sequence[int] | PackedRows) -> Generator[PackedRows]:
    """A context in which models are called with one row that holds these sequences.

    The boundaries are read once (one synchronization if they are on a device). They travel to the layers in place of
    the mask, so that gradient checkpointing still finds them after the context ends.

    Args:
        cu_seqlens: boundaries in tokens, ``(sequences + 1,)``, from 0 to the tokens of the row.
    """
    rows = cu_seqlens if isinstance(cu_seqlens, PackedRows) else PackedRows.of(cu_seqlens)
    token = _current.set(rows)
    try:
        yield rows
    finally:
        _current.reset(token)


def packed_mask(**kwargs: Any) -> torch.Tensor | PackedRows | None:
    """The mask for layers: the packed rows, None for plain causal attention, or the dense mask of ``sdpa``.

    Outside :func:`packed`, transformers finds the rows in ``position_ids``. The dense mask handles padding, a non-empty
    cache and tokens that see later ones (images).

    Raises:
        InvalidInput: within :func:`packed`, anything that packed rows do not support.
    """
    rows = _current.get()
    if rows is not None:
        _check_call(rows, kwargs)
        return rows
    dense = kwargs.get("attention_mask") is not None or kwargs["q_length"] != kwargs["kv_length"]
    if dense or kwargs.get("use_vmap", False):
        return sdpa_mask(**kwargs)
    if kwargs.get("allow_is_causal_skip", False) and kwargs.get("local_size") is None:
        return None
    rows = _rows_of(kwargs)
    if rows is None:
        return sdpa_mask(**kwargs)
    # With a cache, transformers does not look for sequences, but the layers do.
    return rows if len(rows.lengths) > kwargs["batch_size"] else None


def _check_call(rows: PackedRows, kwargs: dict[str, Any]) -> None:
    shape = (kwargs["batch_size"], kwargs["q_length"])
    if shape != (1, rows.num_tokens):
        rule = f"be (1, {rows.num_tokens}) in this packed context"
        raise InvalidInput(must("input_ids", rule, shape, "pass the edges of the row that the model is called with"))
    if kwargs.get("attention_mask") is not None or kwargs.get("use_vmap", False):
        remedy = "packed rows have no padding to mask; leave it out"
        raise InvalidInput(must("attention_mask", "be None in a packed context", "a mask", remedy))
    if kwargs["kv_length"] != kwargs["q_length"]:
        remedy = "call the model with use_cache=False"
        raise InvalidInput(must("past_key_values", "be empty in a packed context", kwargs["kv_length"], remedy))
    if kwargs.get("local_size") is not None and kwargs["local_size"] == _chunk(kwargs.get("config")):
        remedy = "leave the context out, so that rows are found from position_ids"
        raise InvalidInput(must("attention_chunk_size", "be None in a packed context", kwargs["local_size"], remedy))


def _chunk(config: Any) -> int | None:
    return getattr(config, "attention_chunk_size", None)


def _rows_of(kwargs: dict[str, Any]) -> PackedRows | None:
    """Rows according to the mask function just below its diagonal; None if a token may see the next one."""
    rule, device = kwargs["mask_function"], kwargs.get("device", "cpu")
    batch, length = kwargs["batch_size"], kwargs["q_length"]
    row = torch.arange(batch, device=device)[:, None]
    early = torch.arange(length - 1, device=device)[None]
    head = torch.zeros((), dtype=torch.long, device=device)
    shape = (batch, length - 1)
    if bool(rule(row, head, early, early + 1).expand(shape).any()):
        return None
    starts = torch.ones(batch, length, dtype=torch.bool, device=device)
    starts[:, 1:] = ~rule(row, head, early + 1, early).expand(shape)
    return _rows_from_starts(starts)


def _rows_from_starts(starts: torch.Tensor) -> PackedRows:
    edges = [*torch.nonzero(starts.flatten()).flatten().tolist(), starts.numel()]
    return PackedRows(lengths=tuple(end - start for start, end in itertools.pairwise(edges)), stated=False)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PackedRows | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    r"""Causal attention within each packed sequence.

    .. math:: \operatorname{softmax}_{j}\bigl(\operatorname{cap}(s\, q_i \cdot k_j)\bigr)\, v_j,
        \quad j \le i, \quad j > i - w, \quad j \text{ in the sequence of } i

    Half precision on a GPU uses ``flash_attn`` if it is installed, else ``torch.nn.attention.varlen``; everything else
    uses ``scaled_dot_product_attention``, one sequence at a time.

    Args:
        module: attention layer; must be causal.
        query: ``(batch, num_heads, tokens, head_dim)``.
        key: ``(batch, num_kv_heads, tokens, head_dim)``; heads are shared in groups.
        value: like ``key``.
        attention_mask: packed rows, a dense mask, or None if ``cu_seq_lens_q`` or ``position_ids`` define the rows.
        dropout: must be 0.
        scaling: :math:`s`; 1/√head_dim if None.
        sliding_window: :math:`w` tokens that each token sees, including itself.
        softcap: :math:`c` of :math:`\operatorname{cap}(x) = c \tanh(x / c)` (Gemma 2, arXiv 2408.00118).
        is_causal: overrides the attribute of ``module``.
        **kwargs: other arguments of the interface.

    Returns:
        ``(batch, tokens, num_heads, head_dim)``, and None for the scores.

    Raises:
        InvalidInput: dropout, attention sinks or position biases, which are not supported; or rows that do not match.
    """
    if dropout:
        raise InvalidInput(must("attention_dropout", "be 0", dropout, "set it to 0 in the model's config"))
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise InvalidInput(must(name, "be None", "a tensor", f"{NAME} has none; use another attn_implementation"))
    query, key, value = _kernels.autocast(query, key, value)
    options = _kernels.Options(scaling=scaling, window=sliding_window, softcap=softcap)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(attention_mask, torch.Tensor) or (attention_mask is None and _decodes(query, key, causal)):
        return _kernels.attend(query, key, value, attention_mask, options).transpose(1, 2).contiguous(), None
    if not causal:
        raise InvalidInput(must("is_causal", "be True for packed rows", causal, "use another attn_implementation"))
    rows = _rows_for(query, attention_mask, kwargs)
    batch, _, tokens, _ = query.shape
    if sum(rows.lengths) != batch * tokens:
        rule = f"cover the {batch * tokens} tokens of the call"
        raise InvalidInput(must("cu_seqlens", rule, sum(rows.lengths), "pass the edges of the row the model is given"))
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    return _kernels.varlen(q, k, v, rows.lengths, options).unflatten(0, (batch, tokens)), None


def _decodes(query: torch.Tensor, key: torch.Tensor, causal: bool) -> bool:
    """Whether no mask means full attention."""
    if query.shape[2] != key.shape[2] and query.shape[2] > 1 and causal:
        remedy = "empty the cache, or pass a mask"
        raise InvalidInput(must("key", f"hold {query.shape[2]} tokens without a mask", key.shape[2], remedy))
    return query.shape[2] != key.shape[2] or not causal


def _rows_for(query: torch.Tensor, rows: PackedRows | None, kwargs: dict[str, Any]) -> PackedRows:
    """Rows from the caller, from ``cu_seq_lens_q`` or from the positions, in that order; else whole rows."""
    batch, _, tokens, _ = query.shape
    edges: torch.Tensor | None = kwargs.get("cu_seq_lens_q")
    if edges is not None:
        if rows is not None and rows.stated:
            raise InvalidInput(
                must("cu_seq_lens_q", "be None in a packed context", edges.tolist(), "state the edges in one place")
            )
        return PackedRows.of(edges)
    positions: torch.Tensor | None = kwargs.get("position_ids")
    if rows is not None:
        return rows
    if positions is None:
        return PackedRows(lengths=(tokens,) * batch, stated=False)
    if positions.dim() != 2:
        shape = tuple(positions.shape)
        raise InvalidInput(must("position_ids", "be (batch, tokens)", shape, "state the edges with packed(cu_seqlens)"))
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = torch.diff(positions) != 1
    return _rows_from_starts(starts.expand(batch, tokens))
