r"""Attention of single tokens over a paged cache, bitwise independent of the other rows.

A row is one token of one request. Its output is

.. math:: \operatorname{softmax}_{j \le i}(s\, q_i \cdot k_j)\, v_j

computed over chunks of a fixed number of positions with a running maximum and sum (Milakov and Gimelshein, arXiv
1805.02867; FlashAttention, arXiv 2205.14135). All products have the shape of one chunk, so the number of chunks does
not affect a row: a chunk past its end multiplies by :math:`e^0 = 1` and adds 0, which is exact.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# torch's and transformers' modules are typed in part only.

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from equipoise.errors import EquipoiseError, InvalidInput, must
from equipoise.rollout.decode.cache import PagedCache

NAME = "equipoise_paged"
"""The ``attn_implementation`` after :func:`register`."""


@dataclass(frozen=True, kw_only=True)
class PagedRows:
    """Where the rows of a call are in the cache.

    Args:
        cache: the cache to write and read.
        blocks: block for each row's key and value, (rows,).
        offsets: their position within it, (rows,).
        tables: blocks of each row's request, by position, (rows, chunks × blocks per chunk).
        lengths: positions that each row sees, including its own, (rows,).
        chunk_tokens: positions per chunk; a multiple of the block size.
    """

    cache: PagedCache
    blocks: torch.Tensor
    offsets: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    chunk_tokens: int

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self.tables.shape[1] * self.cache.layout.block_size // self.chunk_tokens


_current: ContextVar[PagedRows | None] = ContextVar("equipoise_paged_rows", default=None)


def register() -> str:
    """Register the attention with transformers and return its name; a second call changes nothing."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(**_: Any) -> None:
    """No mask: lengths define what each row sees."""


@contextlib.contextmanager
def paged(rows: PagedRows) -> Generator[None]:
    """A context in which the model is called with these rows, ``(rows, 1)``."""
    token = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write one key and value per row, then attend.

    Args:
        module: attention layer; its ``layer_idx`` names the pool.
        query: ``(rows, num_heads, 1, head_dim)``.
        key: ``(rows, num_kv_heads, 1, head_dim)``.
        value: like ``key``.
        attention_mask: None.
        scaling: scale of the scores; 1/√head_dim if None.
        sliding_window: not supported.
        softcap: not supported.
        **kwargs: other arguments of the interface.

    Returns:
        ``(rows, 1, num_heads, head_dim)``, and None for the scores.

    Raises:
        InvalidInput: windows, caps, sinks or biases, which are not supported.
        EquipoiseError: called outside :func:`paged`.
    """
    rows = _current.get()
    if rows is None:
        raise EquipoiseError(
            "a model with paged attention must be called by its decode engine, got a call from outside"
        )
    for name, got in (("sliding_window", sliding_window), ("softcap", softcap), ("s_aux", kwargs.get("s_aux"))):
        if got is not None:
            raise InvalidInput(must(name, "be None", got, "the decode engine takes models with plain causal attention"))
    pool = rows.cache.pools[int(module.layer_idx)]  # pyright: ignore[reportArgumentType]
    pool[0, :, rows.blocks, rows.offsets] = key[:, :, 0].transpose(0, 1)
    pool[1, :, rows.blocks, rows.offsets] = value[:, :, 0].transpose(0, 1)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    return attend(query[:, :, 0], pool, rows, scale)[:, None], None


def attend(query: torch.Tensor, pool: torch.Tensor, rows: PagedRows, scale: float) -> torch.Tensor:
    """Outputs for ``query``, ``(rows, num_heads, head_dim)``, over one pool, in at least float32."""
    num_rows, num_heads, dim = query.shape
    kv_heads, chunk = pool.shape[1], rows.chunk_tokens
    wide = torch.promote_types(query.dtype, torch.float32)
    batch = (kv_heads * num_rows, num_heads // kv_heads)
    grouped = query.reshape(num_rows, kv_heads, -1, dim).transpose(0, 1).reshape(*batch, dim).to(wide) * scale
    most = torch.full((*batch, 1), -torch.inf, dtype=wide, device=query.device)
    total = torch.zeros_like(most)
    out = torch.zeros_like(grouped)
    places = torch.arange(chunk, device=query.device)
    for tables, start in zip(rows.tables.split(chunk // pool.shape[3], dim=1), range(0, 2**62, chunk), strict=False):
        held = pool.index_select(2, tables.reshape(-1)).to(wide).reshape(2, batch[0], chunk, dim)
        unseen = (places + start >= rows.lengths[:, None]).repeat(kv_heads, 1)[:, None]
        scores = torch.bmm(grouped, held[0].transpose(1, 2)).masked_fill_(unseen, -torch.inf)
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - higher)
        shrink = torch.exp(most - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.bmm(weights, held[1])
        most = higher
    out = (out / total).to(query.dtype)
    return out.reshape(kv_heads, num_rows, -1, dim).transpose(0, 1).reshape(num_rows, num_heads, dim)
