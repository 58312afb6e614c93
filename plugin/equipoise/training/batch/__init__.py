"""Rows of tensors: pad a batch, reorder every column together, put outputs back in order."""

from equipoise.training.batch.padding import pad_batch
from equipoise.training.batch.reorder import reorder, restore

__all__ = ["pad_batch", "reorder", "restore"]
