"""The search: rounds of pairwise swaps over all boards at once, then exact steps at each column's fullest cell."""

from __future__ import annotations

from typing import Literal

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, iota
from equipoise.partition.board import Boards, Rules

Objective = Literal["lockstep", "rank"]


def even_out_loads(boards: Boards, rules: Rules, *, max_rounds: int = 48, tolerance: float = 2e-4) -> None:
    """Rounds of pairwise changes until columns are level, or nothing changes any more.

    Each change lowers the sum of squared excesses over the levels, so that the search ends by itself.

    Args:
        boards: changed in place.
        rules: what a change must respect.
        max_rounds: a bound on the time.
        tolerance: stop when every board's lockstep cost is within this share of its levels' sum.

    """
    idle = 0
    for turn in range(max_rounds):
        target = boards.targets()
        goal = target[:, :: boards.num_ranks].sum(axis=1)
        if (boards.lockstep() <= goal * (1 + tolerance)).all():
            return
        within_column = boards.num_columns > 1 and turn % 2 == 0
        changed = boards.even_out(
            boards.load - target, boards.cost, rules, within_column=within_column, shift=turn // (2 if turn % 2 else 1)
        )
        idle = 0 if changed else idle + 1
        if idle >= 4:
            return


def fit_cap(boards: Boards, rules: Rules, *, max_rounds: int = 64) -> BoolArray:
    """Even out tokens until no cell exceeds the cap, where that can be found.

    Args:
        boards: changed in place.
        rules: what a change must respect; without a cap everything fits.
        max_rounds: a bound on the time.

    Returns:
        Which boards fit, shape (J,).

    """
    if rules.cap is None:
        return np.ones(boards.num_boards, dtype=np.bool_)
    free = Rules(cap=None, moves=rules.moves)
    weight = boards.tokens.astype(np.float64)
    idle = 0
    for turn in range(max_rounds):
        if idle >= 4 or not _over_cap(boards, rules.cap).any():
            break
        changed = boards.even_out(boards.fill.astype(np.float64), weight, free, within_column=False, shift=turn)
        idle = 0 if changed else idle + 1
    return np.asarray(~_over_cap(boards, rules.cap).any(axis=1), dtype=np.bool_)


def _over_cap(boards: Boards, cap: int) -> BoolArray:
    """Which cells are above the cap with more than one row, shape (J, K)."""
    return (boards.fill > cap) & (boards.count > 1)


def polish(
    boards: Boards,
    rules: Rules,
    *,
    objective: Objective = "lockstep",
    max_steps: int = 400,
    tolerance: float | None = None,
) -> None:
    """Steepest exact steps on each board, from the fullest cell of the column that stands highest above its mean.

    Args:
        boards: changed in place; the objective of a board never rises.
        rules: what a change must respect.
        objective: "lockstep" (Σ over columns of the largest load) or "rank" (largest load of a rank).
        max_steps: a bound on the time, for each board.
        tolerance: leave a column whose fullest cell is within this share of its mean; None for one that small boards
            get exactly and large ones within 2e-4.

    """
    step = _lockstep_step if objective == "lockstep" else _rank_step
    if tolerance is None:
        tolerance = 1e-9 if boards.num_rows <= 64 else 2e-4
    for j in range(boards.num_boards):
        stuck = np.zeros(boards.num_columns, dtype=bool)
        for _ in range(max_steps):
            if not step(boards, j, rules, stuck, tolerance):
                break


def _lockstep_step(boards: Boards, j: int, rules: Rules, stuck: BoolArray, tolerance: float) -> bool:
    """Try the column with the most to win; True while some column may still be improved."""
    ranks = boards.num_ranks
    columns = boards.load[j].reshape(boards.num_columns, ranks)
    top = columns.max(axis=1)
    slack = np.where(stuck, -1.0, top - columns.mean(axis=1))
    column = int(slack.argmax())
    if slack[column] <= tolerance * top[column]:
        return False
    in_order = np.sort(columns, axis=1)
    second = in_order[column, -2] if ranks > 1 else 0.0
    cell = column * ranks + int(columns[column].argmax())
    other_top = top[boards.column_of]
    same_column = boards.column_of == column

    rows, partner_row, partner_cell, shift, allowed = _candidates(boards, j, cell, rules)
    grown = boards.load[j][partner_cell] + shift
    here: FloatArray = np.maximum(second, boards.load[j, cell] - shift)
    in_same = same_column[partner_cell]
    here = np.where(in_same, np.maximum(here, grown), here)
    there = np.where(in_same, 0.0, np.maximum(0.0, grown - other_top[partner_cell]))
    change = np.where(allowed, here - boards.load[j, cell] + there, 0.0)
    return _take_best(boards, j, cell, rows, partner_row, partner_cell, change, top[column], stuck, column)


def _rank_step(boards: Boards, j: int, rules: Rules, stuck: BoolArray, tolerance: float) -> bool:
    """Try each cell of the fullest rank in turn; True while a change was found or one is left to try."""
    total = boards.load[j].reshape(boards.num_columns, boards.num_ranks).sum(axis=0)
    rank = int(total.argmax())
    open_columns = np.flatnonzero(~stuck)
    if not open_columns.size or boards.num_ranks == 1 or total[rank] <= total.mean() * (1 + tolerance):
        return False
    column = int(open_columns[0])
    cell = column * boards.num_ranks + rank
    second = np.partition(total, -2)[-2]
    rows, partner_row, partner_cell, shift, allowed = _candidates(boards, j, cell, rules)
    partner_rank = boards.rank_of[partner_cell]
    after = np.maximum(np.maximum(second, total[rank] - shift), total[partner_rank] + shift)
    change = np.where(allowed & (partner_rank != rank), after - total[rank], 0.0)
    found = _take_best(boards, j, cell, rows, partner_row, partner_cell, change, float(total[rank]), stuck, column)
    return found


def _candidates(
    boards: Boards, j: int, cell: int, rules: Rules
) -> tuple[IntArray, IntArray, IntArray, FloatArray, BoolArray]:
    """All swaps of a row of ``cell`` with a row elsewhere, and all moves out of it.

    Returns:
        rows of the cell, shape (A, 1); partner rows, shape (1, B), n for none; their cells, shape (1, B); cost that
        leaves the cell, shape (A, B); which are allowed, shape (A, B).

    """
    n = boards.num_rows
    mine = boards.slots[j, cell, : boards.count[j, cell]]
    partner_row: IntArray = iota(n)
    partner_cell: IntArray = boards.cell[j]
    if rules.moves != "none" and boards.count[j, cell] > 1:
        targets = iota(boards.num_cells)
        if rules.moves == "rank":
            targets = targets[boards.rank_of == boards.rank_of[cell]]
        partner_row = np.concatenate([partner_row, np.full(targets.size, n, dtype=np.int64)])
        partner_cell = np.concatenate([partner_cell, targets])
    shift = boards.cost[j, mine][:, None] - boards.cost[j, partner_row][None, :]
    allowed: BoolArray = (shift > 0) & (partner_cell != cell)[None, :]
    if rules.cap is not None:
        tokens = boards.tokens[j, mine][:, None] - boards.tokens[j, partner_row][None, :]
        count = boards.count[j]
        lone_mine = count[cell] == 1
        lone_partner: BoolArray = ((count[partner_cell] == 1) & (partner_row != n))[None, :]
        allowed &= ((boards.fill[j, cell] - tokens <= rules.cap) | lone_mine) & (
            (boards.fill[j][partner_cell][None, :] + tokens <= rules.cap) | lone_partner
        )
    if boards.kind is not None:
        alike: BoolArray = boards.kind[j, mine][:, None] == boards.kind[j, partner_row][None, :]
        allowed &= alike | (boards.rank_of[partner_cell] == boards.rank_of[cell])[None, :]
    return mine[:, None], partner_row[None, :], partner_cell[None, :], shift, allowed


def _take_best(
    boards: Boards,
    j: int,
    cell: int,
    rows: IntArray,
    partner_row: IntArray,
    partner_cell: IntArray,
    change: FloatArray,
    top: float,
    stuck: BoolArray,
    column: int,
) -> bool:
    best = int(change.argmin())
    a, b = divmod(best, change.shape[1])
    if change[a, b] >= -1e-9 * top:
        stuck[column] = True
        return not stuck.all()
    row, partner, other = int(rows[a, 0]), int(partner_row[0, b]), int(partner_cell[0, b])
    at = int(np.flatnonzero(boards.slots[j, cell] == row)[0])
    if partner == boards.num_rows:
        boards.ensure_room(int(boards.count[j, other]) + 1)
        at_other = int(boards.count[j, other])
    else:
        at_other = int(np.flatnonzero(boards.slots[j, other] == partner)[0])
    one = np.array([j])
    boards.exchange(one, np.array([cell]), np.array([at]), np.array([other]), np.array([at_other]))
    stuck[:] = False
    return True
