"""A paged cache of keys and values: one pool of blocks per layer, one list of blocks per request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from equipoise.errors import EquipoiseError, InvalidInput, must
from equipoise.rollout.transfer.state import KVLayout

ZEROS = 0
"""The block for unused entries of a block table; read under a mask, never written."""
SPARE = 1
"""The block that padding rows write to and read from."""
RESERVED = 2


class OutOfBlocks(EquipoiseError, RuntimeError):
    """The pool has fewer free blocks than requested."""


class PagedCache:
    """Pools of blocks, ``(2, num_kv_heads, blocks, block_size, head_dim)`` per layer: keys, then values.

    Heads come before blocks, so that one gather returns the operands of attention. Blocks are zeroed on allocation, so
    values of an earlier request, including NaN, cannot reach a later one.

    Args:
        layout: layout of the blocks.
        num_blocks: number of blocks for requests.
        device: device of the pools.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, device: torch.device) -> None:
        if num_blocks < 1:
            raise InvalidInput(must("num_blocks", "be at least 1", num_blocks, "pass the blocks that memory allows"))
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (2, layout.num_kv_heads, num_blocks + RESERVED, layout.block_size, layout.head_dim)
        self.pools = [_zeros(shape, layout.torch_dtype, device) for _ in range(layout.num_layers)]
        self._free = list(range(num_blocks + RESERVED - 1, RESERVED - 1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def take(self, number: int) -> list[int]:
        """Allocate ``number`` blocks of zeros.

        Raises:
            OutOfBlocks: there are fewer; none is allocated.
        """
        if number > len(self._free):
            raise OutOfBlocks(f"the cache must have {number} free blocks, got {len(self._free)}; raise num_blocks")
        if number == 0:
            return []
        blocks = [self._free.pop() for _ in range(number)]
        where = self._index(blocks)
        for pool in self.pools:
            pool.index_fill_(2, where, 0)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free allocated blocks."""
        self._free.extend(reversed(blocks))

    def read(self, layer: int, blocks: Sequence[int]) -> torch.Tensor:
        """A copy of blocks of one layer, ``(2, num_kv_heads, len(blocks), block_size, head_dim)``."""
        return self.pools[layer].index_select(2, self._index(blocks))

    def write(self, layer: int, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Undo :meth:`read`."""
        self.pools[layer].index_copy_(2, self._index(blocks), content.to(self.pools[layer].device))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=self.pools[0].device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy requests zero pages, which take memory only when written; torch writes them at once
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).reshape(shape)


class CachedLayers(Sequence[torch.Tensor]):
    """The cache of one request by layer, copied on access, so that sending needs no second cache."""

    def __init__(self, cache: PagedCache, blocks: Sequence[int]) -> None:
        self._cache = cache
        self._blocks = tuple(blocks)

    def __len__(self) -> int:
        return self._cache.layout.num_layers

    def __getitem__(self, layer: int | slice) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(layer, slice) or not 0 <= layer < len(self):
            raise IndexError(layer)
        return self._cache.read(layer, self._blocks)
