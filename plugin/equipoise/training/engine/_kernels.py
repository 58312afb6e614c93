"""Attention over packed rows: a variable-length kernel, or one sequence at a time."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

LARGEST_HEAD = 256
"""The largest head dimension that flash kernels support."""
BLOCK = 512
"""Queries per block if a mask is needed, which bounds the mask's rows."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What varies by layer: scale of the scores, sliding window, cap on the scores."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "tuple[int, ...]", Options], torch.Tensor]


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to the dtype of the autocast context, if any: rotary embeddings leave queries and keys in float32.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     [x.dtype for x in autocast(torch.zeros(1), torch.zeros(1, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]

    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], options: Options
) -> torch.Tensor:
    """Causal attention within each sequence.

    Args:
        query: ``(num_heads, tokens, head_dim)``.
        key: ``(num_kv_heads, tokens, head_dim)``.
        value: like ``key``.
        lengths: tokens of each sequence.
        options: those of the layer.

    Returns:
        ``(tokens, num_heads, head_dim)``.
    """
    flash = (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1] <= LARGEST_HEAD
    )
    kernel = _kernel(options.softcap is not None) if flash else one_by_one
    return kernel(query, key, value, lengths, options)


@functools.cache
def _kernel(softcap: bool) -> Kernel:
    """The best installed kernel."""
    if importlib.util.find_spec("flash_attn") is not None:
        return _flash_attn
    if not softcap and importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        if {"window_size", "enable_gqa", "scale"} <= inspect.signature(varlen_attn).parameters.keys():
            return _torch_varlen
    return one_by_one


def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], options: Options
) -> torch.Tensor:
    """:func:`varlen` for any device and dtype."""
    parts = zip(*(x[None].split(list(lengths), dim=2) for x in (query, key, value)), strict=True)
    out = torch.cat([_causal(q, k, v, options) for q, k, v in parts], dim=2)
    return out[0].transpose(0, 1).contiguous()


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """One sequence, ``(1, heads, tokens, head_dim)``; a mask covers a block of queries and their visible keys."""
    length, window = q.shape[2], options.window
    if window is None or window >= length:
        window = length
        if options.softcap is None:
            return attend(q, k, v, None, options, is_causal=True)
    blocks: list[torch.Tensor] = []
    for start in range(0, length, BLOCK):
        end, first = min(start + BLOCK, length), max(0, start - window + 1)
        i = torch.arange(start, end, device=q.device)[:, None]
        j = torch.arange(first, end, device=q.device)[None]
        seen = (j <= i) & (j > i - window)
        blocks.append(attend(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], seen, options))
    return torch.cat(blocks, dim=2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Options,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention ``(batch, num_heads, tokens, head_dim)`` under a mask, with grouped heads and a cap on scores."""
    grouped = query.shape[1] != key.shape[1]
    if options.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, mask, scale=options.scaling, is_causal=is_causal, enable_gqa=grouped
        )
    if grouped:
        times = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / options.softcap)) * options.softcap
    if mask is not None:
        banned = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, banned) if mask.dtype == torch.bool else scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(value.dtype) @ value


@functools.lru_cache(maxsize=8)
def _edges(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Copied to the device once for all layers, outside inference mode because backward may keep it."""
    with torch.inference_mode(False):
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def _flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], options: Options
) -> torch.Tensor:
    function: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
    edges, longest = _edges(lengths, query.device), max(lengths)
    return function(
        *(x.transpose(0, 1) for x in (query, key, value)),
        cu_seqlens_q=edges,
        cu_seqlens_k=edges,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=options.scaling,
        causal=True,
        window_size=(-1 if options.window is None else options.window - 1, 0),
        softcap=options.softcap or 0.0,
    )


def _torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], options: Options
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    edges, longest = _edges(lengths, query.device), max(lengths)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    out: Any = varlen_attn(
        q,
        k,
        v,
        edges,
        edges,
        longest,
        longest,
        scale=options.scaling,
        window_size=(-1 if options.window is None else options.window - 1, 0),
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return out
