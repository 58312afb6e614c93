"""Levelling whole ranks, for engines that meet once per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, int_sums, sums
from equipoise.planning.partition.board import Rules
from equipoise.planning.partition.deepen import MAX_ROWS, SmallBoard

_MAX_STEPS = 2000
_NUM_PARTNERS = 16


def level_ranks(board: SmallBoard, cell: IntArray, rules: Rules, *, goal: float) -> IntArray:
    """Swap rows of the fullest rank with rows of others until its total falls no further.

    Rows trade places, so that every rank and micro-batch keeps its number of rows; the cap holds in both places.

    Args:
        board: the rows; any number of them.
        cell: cell of each row, shape (n,), within the rules.
        rules: what a change must respect.
        goal: total of a rank that cannot be beaten; the search stops there.

    Returns:
        Cell of each row, shape (n,); the largest total of a rank is at most what it was.
    """
    cell = np.array(cell, dtype=np.int64)
    total = sums(cell % board.num_ranks, board.cost, board.num_ranks)
    fill = int_sums(cell, board.tokens, board.num_cells)
    count = counts(cell, board.num_cells)
    near = 1e-9 if board.cost.size <= MAX_ROWS else 1e-4
    for _ in range(_MAX_STEPS):
        fullest = int(total.argmax())
        if total[fullest] <= goal * (1 + near) or board.num_ranks == 1:
            break
        rank = cell % board.num_ranks
        swap = None
        for partners in _partner_ranks(total):
            swap = _best_swap(board, cell, rank, total, fill, count, rules, fullest, partners)
            if swap is not None:
                break
        if swap is None:
            break
        i, j = swap
        shift, moved = board.cost[i] - board.cost[j], int(board.tokens[i] - board.tokens[j])
        total[fullest] -= shift
        total[rank[j]] += shift
        fill[cell[i]] -= moved
        fill[cell[j]] += moved
        cell[i], cell[j] = int(cell[j]), int(cell[i])
    return cell


def _partner_ranks(total: FloatArray) -> Iterator[IntArray]:
    """The ranks with the least to do, which nearly always hold the best partner; then all."""
    order: IntArray = np.argsort(total, kind="stable")[:-1]
    if order.size > 2 * _NUM_PARTNERS:
        yield order[:_NUM_PARTNERS]
    yield order


def _best_swap(
    board: SmallBoard,
    cell: IntArray,
    rank: IntArray,
    total: FloatArray,
    fill: IntArray,
    count: IntArray,
    rules: Rules,
    fullest: int,
    partners: IntArray,
) -> tuple[int, int] | None:
    """A row of the fullest rank and one of a partner rank, after whose swap the fuller of the two is lowest."""
    among = np.zeros(board.num_ranks, dtype=np.bool_)
    among[partners] = True
    mine, others = np.flatnonzero(rank == fullest), np.flatnonzero(among[rank] & (rank != fullest))
    shift = board.cost[mine][:, None] - board.cost[others]
    after: FloatArray = np.maximum(total[fullest] - shift, total[rank[others]] + shift)
    allowed: BoolArray = (shift > 0) & (board.kind[mine][:, None] == board.kind[others])
    if rules.cap is not None:
        tokens = board.tokens[mine][:, None] - board.tokens[others]
        allowed &= (fill[cell[others]] + tokens <= rules.cap) | (count[cell[others]] == 1)
        allowed &= (fill[cell[mine]][:, None] - tokens <= rules.cap) | (count[cell[mine]] == 1)[:, None]
    a, b = divmod(int(np.where(allowed, after, np.inf).argmin()), others.size)
    if not allowed[a, b] or after[a, b] >= total[fullest] * (1 - 1e-12):
        return None
    return int(mine[a]), int(others[b])
