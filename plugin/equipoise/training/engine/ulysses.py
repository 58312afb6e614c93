r"""Sequence parallelism: ranks share the tokens of a row, and trade them for heads around attention.

Each of ``sp`` ranks holds 1/sp of the tokens of a packed row. Before attention, an all-to-all gives each rank all
tokens of 1/sp of the heads; after it, another returns all heads of the rank's tokens. Everything else in a transformer
block works token by token. Models whose blocks mix tokens elsewhere (convolutions, linear attention, recurrences) are
not supported.

Each rank of the group computes the same loss from gathered predictions. The mean of its gradient over ranks is that of
one process: over ``sp`` ranks here, over ``dp × sp`` ranks if losses are averaged over ``dp``. DDP and FSDP compute
that mean over all ranks, so ``sp`` is not divided out anywhere else.

    padded = pad_to_multiple(input_ids, sp_size(group))
    positions = pad_to_multiple(position_ids, sp_size(group))
    with sharded(cu_seqlens, group):
        hidden = model(shard_sequence(padded, group), position_ids=shard_sequence(positions, group), use_cache=False)
    predictions = gather_sequence(of(hidden), group, length=input_ids.shape[-1])

Reference: S. A. Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509), section 3.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false
# transformers' attention interface and torch's autograd context are typed in part only.

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from equipoise._checks import positive
from equipoise.errors import InvalidInput, must
from equipoise.training.engine._kernels import autocast
from equipoise.training.engine.attention import PackedRows, packed, packed_attention, packed_mask

NAME = "equipoise_ulysses"
"""The ``attn_implementation`` after :func:`register`."""

Group = dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class ShardedRows(PackedRows):
    """Packed rows whose tokens are sharded over the ranks of a group; padding at the end is its own sequence.

    Args:
        group: ranks that share the row.
    """

    group: dist.ProcessGroup

    @property
    def num_tokens(self) -> int:
        """Tokens in the model call on this rank."""
        return sum(self.lengths) // sp_size(self.group)

    @property
    def whole(self) -> PackedRows:
        """The rows for attention, with all tokens."""
        return PackedRows(lengths=self.lengths)


def sp_size(group: Group) -> int:
    """Ranks that share a row; 1 without a group.

    >>> sp_size(None)
    1

    """
    return 1 if group is None else dist.get_world_size(group)


def register() -> str:
    """Register the attention with transformers and return its name; a second call changes nothing."""
    AttentionInterface.register(NAME, ulysses_attention)
    AttentionMaskInterface.register(NAME, packed_mask)
    return NAME


def check_heads(num_attention_heads: int, size: int) -> None:
    """Check that heads divide evenly, before anything is sent.

    Raises:
        InvalidInput: they do not.

    >>> check_heads(8, 4)
    >>> check_heads(6, 4)
    Traceback (most recent call last):
    equipoise.errors.InvalidInput: num_attention_heads must be a multiple of sp_size 4, got 6; set sp_size to one of [1, 2, 3, 6]

    """  # noqa: E501
    if num_attention_heads % size:
        legal = [n for n in range(1, num_attention_heads + 1) if num_attention_heads % n == 0]
        rule = f"be a multiple of sp_size {size}"
        raise InvalidInput(must("num_attention_heads", rule, num_attention_heads, f"set sp_size to one of {legal}"))


@contextlib.contextmanager
def sharded(cu_seqlens: torch.Tensor | Sequence[int], group: Group) -> Generator[PackedRows]:
    """A context in which models are called with this rank's shard of a row that holds these sequences.

    Without a group, or with one rank, it is :func:`~equipoise.training.engine.attention.packed`.

    Args:
        cu_seqlens: boundaries in tokens of the whole row before padding, ``(sequences + 1,)``, equal on all ranks.
        group: ranks that share the row, each with its own shard.
    """
    rows = PackedRows.of(cu_seqlens)
    if group is not None and sp_size(group) > 1:
        short = -rows.num_tokens % sp_size(group)
        rows = ShardedRows(lengths=(*rows.lengths, short) if short else rows.lengths, group=group)
    with packed(rows):
        yield rows


def ulysses_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PackedRows | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Packed attention over the tokens of all ranks, for this rank's heads.

    Key and value heads that do not divide evenly are repeated ``lcm(num_kv_heads, sp) / num_kv_heads`` times; their
    gradients add up.

    Args:
        module: attention layer.
        query: ``(1, num_heads, tokens / sp, head_dim)``.
        key: ``(1, num_kv_heads, tokens / sp, head_dim)``.
        value: like ``key``.
        attention_mask: :class:`ShardedRows` from :func:`sharded`; with anything else, attention is local to this rank.
        **kwargs: other arguments of the interface.

    Returns:
        ``(1, tokens / sp, num_heads, head_dim)``, and None for the scores.

    Raises:
        InvalidInput: ``sp`` does not divide the query heads; raised before anything is sent.
    """
    if not isinstance(attention_mask, ShardedRows):
        return packed_attention(module, query, key, value, attention_mask, **kwargs)
    group = attention_mask.group
    check_heads(query.shape[1], sp_size(group))
    query, key, value = autocast(query, key, value)
    times = math.lcm(key.shape[1], sp_size(group)) // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    if key.shape[-1] == value.shape[-1] == query.shape[-1]:
        query, key, value = _scatter_heads([query, key, value], group)
    else:
        query, key = _scatter_heads([query, key], group)
        (value,) = _scatter_heads([value], group)
    out, _ = packed_attention(module, query, key, value, attention_mask.whole, **kwargs)
    return gather_heads(out, group), None


def _scatter_heads(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """From ``(1, heads, tokens / sp, dim)`` to ``(1, heads / sp, tokens, dim)``, all tensors in one all-to-all."""
    size = sp_size(group)
    parts = [x[0].unflatten(0, (size, -1)) for x in tensors]  # (sp, heads / sp, tokens / sp, dim)
    mine = exchange(torch.cat(parts, dim=1), group).transpose(0, 1).flatten(1, 2)
    return [x[None] for x in mine.split([part.shape[1] for part in parts])]


def gather_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From ``(1, tokens, heads / sp, dim)`` to ``(1, tokens / sp, heads, dim)``, in one all-to-all."""
    parts = exchange(x[0].unflatten(0, (sp_size(group), -1)), group)  # (sp, tokens / sp, heads / sp, dim)
    return parts.transpose(0, 1).flatten(1, 2)[None]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        return _Exchange.apply(grad_outputs[0], ctx.group), None


def exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send part ``r`` to rank ``r``: an all-to-all, which is its own inverse and its own adjoint.

    Args:
        x: ``(sp, ...)``, one part for each rank of the group.
        group: ranks that take part.

    Returns:
        ``(sp, ...)``, one part from each rank of the group.
    """
    return _Exchange.apply(x, group)  # pyright: ignore[reportReturnType]


def pad_to_multiple(x: torch.Tensor, multiple: int, *, dim: int = -1, value: float = 0) -> torch.Tensor:
    """Append ``value`` to ``x`` until ``dim`` is a multiple.

    >>> pad_to_multiple(torch.tensor([[5, 6, 7]]), 2)
    tensor([[5, 6, 7, 0]])

    """
    positive("multiple", multiple, "pass the number of ranks that share a row")
    short = -x.shape[dim] % multiple
    if not short:
        return x
    shape = list(x.shape)
    shape[dim] = short
    return torch.cat([x, x.new_full(shape, value)], dim=dim)


def shard_sequence(x: torch.Tensor, group: Group, *, dim: int = -1) -> torch.Tensor:
    """The part of this rank of a tensor that every rank holds whole.

    The gradient of the whole tensor is gathered from all ranks and divided by ``sp``, which undoes the factor of
    :func:`gather_sequence`: sharding and gathering leave a gradient unchanged.

    Args:
        x: equal on all ranks of the group; its ``dim`` is a multiple of their number.
        group: ranks that share the sequence; None for this process alone.
        dim: the dimension of tokens.

    Raises:
        InvalidInput: the group's size does not divide ``dim``.
    """
    if group is None or sp_size(group) == 1:
        return x
    if x.shape[dim] % sp_size(group):
        rule = f"have a multiple of {sp_size(group)} tokens in dimension {dim}"
        raise InvalidInput(must("x", rule, tuple(x.shape), "call pad_to_multiple first"))
    return _Shard.apply(x, group, dim)  # pyright: ignore[reportReturnType]


def gather_sequence(x: torch.Tensor, group: Group, *, dim: int = -1, length: int | None = None) -> torch.Tensor:
    """Concatenate the parts of all ranks.

    The adjoint would sum the gradients of all ranks. Because each rank computes the same loss, that sum is ``sp`` times
    the rank's own gradient of its part, which needs no collective.

    Args:
        x: this rank's part, of the same shape on all ranks.
        group: ranks that share the sequence; None for this process alone.
        dim: the dimension of tokens.
        length: tokens to keep; the rest is padding.
    """
    whole: torch.Tensor = x
    if group is not None and sp_size(group) > 1:
        whole = _Gather.apply(x, group, dim)  # pyright: ignore[reportAssignmentType]
    return whole if length is None else whole.narrow(dim, 0, length)


def _own(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    return x.chunk(sp_size(group), dim)[dist.get_rank(group)].contiguous()


def _all(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(sp_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _own(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        return _all(grad_outputs[0], ctx.group, ctx.dim) / sp_size(ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _all(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        return _own(grad_outputs[0], ctx.group, ctx.dim) * sp_size(ctx.group), None, None
