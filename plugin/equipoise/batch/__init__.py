"""Rows of tensors: pad a batch, reorder every column together, put outputs back in order."""

from equipoise.batch.padding import pad_batch
from equipoise.batch.reorder import reorder, restore

__all__ = ["pad_batch", "reorder", "restore"]
