"""Balancing whole ranks, for engines that synchronize once per optimizer step."""

from __future__ import annotations

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray
from equipoise.planning.partition.board import Boards
from equipoise.planning.partition.refine import SMALL

_MAX_STEPS = 2000
_NUM_PARTNERS = 16  # the least loaded ranks nearly always hold the best partner; if not, all are searched


def level_ranks(boards: Boards, cap: int | None, *, goal: float) -> None:
    """Swap rows of the fullest rank with rows of other ranks until its total stops falling.

    Every rank and micro-batch keeps its number of rows, and both stay under the cap. The search stops at ``goal``, a
    lower bound on the total of the fullest rank.
    """
    near = 1e-9 if boards.num_rows <= SMALL else 1e-4
    for _ in range(_MAX_STEPS):
        total = boards.columns()[0].sum(axis=0)
        order: IntArray = np.argsort(total, kind="stable")
        if total[order[-1]] <= goal * (1 + near):
            return
        swap = _best_swap(boards, cap, total, order[:-1][:_NUM_PARTNERS])
        swap = swap or _best_swap(boards, cap, total, order[:-1])
        if swap is None:
            return
        boards.swap_rows(0, *swap)


def _best_swap(boards: Boards, cap: int | None, total: FloatArray, partners: IntArray) -> tuple[int, int] | None:
    """The row of the fullest rank and the row of a partner whose swap leaves the fuller of the two ranks lowest."""
    fullest, cell = int(total.argmax()), boards.cell[0]
    cost, tokens, fill, alone = boards.cost[0], boards.tokens[0], boards.fill[0], boards.count[0] == 1
    rank = boards.rank_of[cell]
    mine, others = np.flatnonzero(rank == fullest), np.flatnonzero(np.isin(rank, partners))
    if not others.size:
        return None
    shift = cost[mine][:, None] - cost[others]
    after: FloatArray = np.maximum(total[fullest] - shift, total[rank[others]] + shift)
    allowed: BoolArray = shift > 0
    if boards.kind is not None:
        allowed &= boards.kind[0, mine][:, None] == boards.kind[0, others]
    if cap is not None:
        moved = tokens[mine][:, None] - tokens[others]
        allowed &= (fill[cell[others]] + moved <= cap) | alone[cell[others]]
        allowed &= (fill[cell[mine]][:, None] - moved <= cap) | alone[cell[mine]][:, None]
    a, b = divmod(int(np.where(allowed, after, np.inf).argmin()), others.size)
    if not allowed[a, b] or after[a, b] >= total[fullest] * (1 - 1e-12):
        return None
    return int(mine[a]), int(others[b])
