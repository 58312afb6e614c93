r"""Attention over packed rows on a CPU, without the cost of a dense mask.

Rows of lengths :math:`L_1, \dots, L_k` packed into one sequence cost :math:`\sum_i L_i^2` scores here. The ``sdpa`` of
transformers computes the same with a dense mask of :math:`(\sum_i L_i)^2` scores.

Select it with ``+actor_rollout_ref.model.override_config.attn_implementation=equipoise_varlen_cpu`` and, for a critic,
``+critic.model.override_config.attn_implementation=equipoise_varlen_cpu``. The reference model uses the actor's.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false
# transformers' attention interface is only partly typed.

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from equipoise.errors import InvalidInput, must

NAME = "equipoise_varlen_cpu"


def register() -> None:
    """Register the function with transformers under :data:`NAME`; idempotent."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, varlen_mask)


def row_lengths(position_ids: torch.Tensor) -> list[int]:
    """Return the lengths of the rows packed into one sequence: a row starts where positions do not increase by one.

    Args:
        position_ids: ``(num_tokens,)`` integers.

    >>> row_lengths(torch.tensor([0, 1, 2, 0, 0, 1]))
    [3, 1, 2]
    """
    starts = torch.nonzero(torch.diff(position_ids) != 1).flatten() + 1
    edges = [0, *starts.tolist(), position_ids.numel()]
    return [end - start for start, end in itertools.pairwise(edges)]


def varlen_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return None if causal order and row boundaries suffice, else the dense mask of ``sdpa``.

    Padding, a cache that already holds tokens, a sliding window and a mask from the caller need the dense one.
    """
    dense = (
        bool(args)
        or kwargs.get("attention_mask") is not None
        or kwargs["q_length"] != kwargs["kv_length"]
        or kwargs.get("local_size") is not None
        or kwargs.get("use_vmap", False)
    )
    return sdpa_mask(*args, **kwargs) if dense else None


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed row; without packing, ``sdpa`` as it is.

    Args:
        module: attention layer, for its grouping of heads.
        query: ``(batch, num_heads, num_tokens, head_dim)``.
        key: ``(batch, num_kv_heads, num_tokens, head_dim)``.
        value: likewise.
        attention_mask: dense mask, or None to find the rows.
        **kwargs: of the interface. Rows come from ``cu_seq_lens_q``, else from ``position_ids``.

    Returns:
        ``(batch, num_tokens, num_heads, head_dim)``, and None for the scores.
    """
    rows = _packed_rows(query, kwargs) if attention_mask is None else None
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    packed = [
        torch.cat(
            [
                sdpa_attention_forward(module, q, k, v, None, **kwargs)[0]
                for q, k, v in zip(
                    query[i : i + 1].split(lengths, dim=2),
                    key[i : i + 1].split(lengths, dim=2),
                    value[i : i + 1].split(lengths, dim=2),
                    strict=True,
                )
            ],
            dim=1,
        )
        for i, lengths in enumerate(rows)
    ]
    return torch.cat(packed), None


def _packed_rows(query: torch.Tensor, kwargs: dict[str, Any]) -> list[list[int]] | None:
    """Row lengths of each sequence of the batch, or None if nothing is packed."""
    batch, num_tokens = query.shape[0], query.shape[2]
    edges: torch.Tensor | None = kwargs.get("cu_seq_lens_q")
    positions: torch.Tensor | None = kwargs.get("position_ids")
    if edges is not None:
        rows = [torch.diff(edges).tolist()]
        if batch != 1 or sum(rows[0]) != num_tokens:
            raise InvalidInput(
                must("cu_seq_lens_q", "cover one sequence", edges.tolist(), f"got {batch} sequences of {num_tokens}")
            )
    elif positions is not None:
        if positions.dim() != 2:
            raise InvalidInput(
                must("position_ids", "be (batch, num_tokens)", tuple(positions.shape), f"pass cu_seq_lens_q to {NAME}")
            )
        rows = [row_lengths(row) for row in positions.expand(batch, num_tokens)]
    else:
        return None
    return rows if any(len(lengths) > 1 for lengths in rows) else None
