"""Rows of tensors: pad a batch, reorder all its columns, split it by a plan, restore the order of outputs."""

from equipoise.training.batch.cut import consecutive, cut_rows, join_outputs, restore
from equipoise.training.batch.padding import pad_batch, padding_row
from equipoise.training.batch.reorder import num_rows, reorder, row_lengths, token_lengths

__all__ = [
    "consecutive",
    "cut_rows",
    "join_outputs",
    "num_rows",
    "pad_batch",
    "padding_row",
    "reorder",
    "restore",
    "row_lengths",
    "token_lengths",
]
