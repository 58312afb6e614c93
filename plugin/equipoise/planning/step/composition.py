"""Mini-batches: which rows each optimizer step gets, and how padding is spread over steps and ranks."""

from __future__ import annotations

import numpy as np

from equipoise._arrays import BoolArray, IntArray
from equipoise.planning.step.spec import StepSpec


def split_sizes(n: int, parts: int) -> IntArray:
    """Split ``n`` into ``parts`` sizes that differ by at most 1, shape (parts,).

    >>> split_sizes(10, 3).tolist()
    [4, 3, 3]
    """
    return np.full(parts, n // parts) + (np.arange(parts) < n % parts)


def mini_batch_rows(lengths: IntArray, is_padding: BoolArray, spec: StepSpec) -> list[IntArray]:
    """Row ids of each mini-batch, in the caller's order.

    "keep" cuts the batch into contiguous blocks. Trainers append padding at the end; if that leaves a block with over
    ``dp_size`` fewer real rows than another, the real rows are cut evenly, in order, and padding fills the blocks.

    Returns:
        ``num_mini_batches`` arrays, all of one size with ``equal_count``.
    """
    blocks = split_sizes(lengths.size, spec.num_mini_batches)
    real, padding = np.flatnonzero(~is_padding), np.flatnonzero(is_padding)
    if spec.composition == "keep":
        cut = np.split(np.arange(lengths.size), np.cumsum(blocks)[:-1])
        count = np.array([int((~is_padding[rows]).sum()) for rows in cut])
        if count.min() > 0 and count.max() - count.min() <= spec.dp_size:
            return cut
    else:
        real = real[np.argsort(-lengths[real], kind="stable")]  # "sorted": the first step gets the longest rows
    if spec.composition == "stratified":
        real_parts = _stratified(real, spec)
    else:
        real_parts = np.split(real, np.cumsum(split_sizes(real.size, spec.num_mini_batches))[:-1])
    room = blocks - np.array([rows.size for rows in real_parts])
    pads = np.split(padding, np.cumsum(room)[:-1])
    return [np.sort(np.concatenate([rows, pad])) for rows, pad in zip(real_parts, pads, strict=True)]


def _stratified(falling: IntArray, spec: StepSpec) -> list[IntArray]:
    """Deal rows by descending length, one to each mini-batch, in an order that is redrawn for every deal."""
    steps = spec.num_mini_batches
    draw = np.random.default_rng(spec.seed)
    rounds, rest = divmod(falling.size, steps)  # like split_sizes, the first steps get one more
    dealt: IntArray = draw.permuted(np.tile(np.arange(steps), (rounds, 1)), axis=1).ravel()
    step = np.append(dealt, np.arange(rest))
    return [np.sort(falling[step == j]) for j in range(steps)]


def rank_rows(sizes: IntArray, real: IntArray, dp_size: int) -> tuple[IntArray, IntArray]:
    """Rows and real rows of each rank in each mini-batch, each shape (num_mini_batches, dp_size).

    Both are split evenly. Leftover rows go to ranks in turn, across mini-batches, so the ranks' totals also differ by
    at most 1. Leftover real rows go to the ranks with one row more, and on a tie to those with the fewest real rows so
    far.
    """
    rows = np.empty((sizes.size, dp_size), dtype=np.int64)
    real_rows = np.empty_like(rows)
    rank = np.arange(dp_size)
    turn = 0
    for j, (size, num_real) in enumerate(zip(sizes.tolist(), real.tolist(), strict=True)):
        base, extra = divmod(size, dp_size)
        rows[j] = base + ((rank - turn) % dp_size < extra)
        turn = (turn + extra) % dp_size
        base, extra = divmod(num_real, dp_size)
        real_rows[j] = base
        real_rows[j, np.lexsort((real_rows[:j].sum(axis=0), -rows[j]))[:extra]] += 1
    return rows, real_rows
