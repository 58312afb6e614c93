"""The search: rounds of pairwise swaps over all boards at once, exact steps at each column's fullest cell, kicks."""

from __future__ import annotations

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray
from equipoise.planning.partition.board import Boards, Pairs, Rules
from equipoise.planning.partition.swaps import Swaps

SMALL = 64
"""Boards of at most so many rows are searched to the end, and from kicked copies of the best layout."""

_COST_OF_A_STEP = 20_000  # in swaps: what the numpy calls of one step cost beside them


def even_out_loads(boards: Boards, rules: Rules, *, max_rounds: int = 48, tolerance: float = 2e-4) -> None:
    """Rounds of pairwise changes until columns are level, or nothing changes any more.

    Each change lowers the sum of squared excesses over the levels, so that the search ends by itself; it ends early
    where every board's lockstep cost is within ``tolerance`` of the sum of its levels.
    """
    active = np.ones(boards.num_boards, dtype=np.bool_)
    kinds: tuple[Pairs, ...] = ("any",) if boards.num_columns == 1 else ("rank", "column", "any")
    if rules.moves == "none":
        kinds = tuple(kind for kind in kinds if kind != "rank")
    idle, before = 0, np.full(boards.num_boards, np.inf)
    for turn in range(max_rounds):
        target = boards.targets()
        goal = target[:, :: boards.num_ranks].sum(axis=1)
        lockstep = boards.lockstep()
        active &= lockstep > goal * (1 + tolerance)
        if turn % 12 == 0:
            active &= lockstep < before * (1 - tolerance)
            before = lockstep
        if not active.any():
            return
        kind, shift = kinds[turn % len(kinds)], turn // len(kinds)
        changed = boards.even_out(boards.load - target, boards.cost, rules, active=active, pairs=kind, shift=shift)
        idle = 0 if changed else idle + 1
        if idle >= 4:
            return


def fit_cap(boards: Boards, rules: Rules, *, max_rounds: int = 8, max_steps: int = 96) -> BoolArray:
    """Bring every cell under the cap by rounds of pairwise changes, then exact steps; tell which boards fit, (J,)."""
    if rules.cap is None:
        return np.ones(boards.num_boards, dtype=np.bool_)
    free = Rules(cap=None, moves=rules.moves, alike=rules.alike)
    weight = boards.tokens.astype(np.float64)
    kinds: tuple[Pairs, ...] = ("any",) if rules.moves == "none" else ("rank", "any")
    for turn in range(max_rounds):
        over: BoolArray = np.asarray(_over_cap(boards, rules.cap).any(axis=1), dtype=np.bool_)
        if not over.any():
            break
        excess = boards.fill.astype(np.float64)
        kind = kinds[turn % len(kinds)]
        boards.even_out(excess, weight, free, active=over, pairs=kind, shift=turn // len(kinds))
    for j in np.flatnonzero(_over_cap(boards, rules.cap).any(axis=1)).tolist():
        _relieve(boards, j, free, rules.cap, max_steps)
    return np.asarray(~_over_cap(boards, rules.cap).any(axis=1), dtype=np.bool_)


def _relieve(boards: Boards, j: int, free: Rules, cap: int, max_steps: int) -> None:
    """Take from the fullest cells what brings them under the cap, into cells that it leaves under it.

    Of the swaps and moves that leave the fewest tokens above the cap, the one after which columns grow least is made.
    """
    cost, tokens = boards.cost[j], boards.tokens[j]
    stuck = np.zeros(boards.num_cells, dtype=np.bool_)
    for _ in range(max_steps):
        fill, count = boards.fill[j], boards.count[j]
        over: IntArray = np.where(count > 1, np.maximum(fill - cap, 0), 0)
        cell = int(np.where(stuck, 0, over).argmax())
        if stuck[cell] or not over[cell]:
            return
        swaps = Swaps.of(boards, j, cell, free)
        partner = swaps.partner_cell
        moved: IntArray = tokens[swaps.rows][:, None] - tokens[swaps.partner_row]
        lone = (count[partner] == 1) & (swaps.partner_row != boards.num_rows)
        left: IntArray = np.maximum(over[cell] - moved, 0) - over[cell]
        left = left + np.where(lone, 0, np.maximum(fill[partner] + moved - cap, 0) - over[partner])
        top = boards.load[j].reshape(boards.num_columns, boards.num_ranks).max(axis=1)
        grown: FloatArray = boards.load[j, partner] + cost[swaps.rows][:, None] - cost[swaps.partner_row]
        grown = np.maximum(grown - top[boards.column_of[partner]], 0.0)
        value: FloatArray = np.where(swaps.allowed & (left < 0), left + grown / (1.0 + top.sum()), 0.0)
        a, b = divmod(int(value.argmin()), value.shape[1])
        if value[a, b] < 0:
            swaps.apply(boards, j, a, b)
            stuck[:] = False
        else:
            stuck[cell] = True


def _over_cap(boards: Boards, cap: int) -> BoolArray:
    """Which cells are above the cap with more than one row, shape (J, K)."""
    return (boards.fill > cap) & (boards.count > 1)


def polish(
    boards: Boards,
    rules: Rules,
    *,
    goals: FloatArray | None = None,
    max_swaps: int = 15_000_000,
    tolerance: float | None = None,
) -> None:
    """Steepest exact steps on each board, from the fullest cell of the column that stands highest above its mean.

    The lockstep cost of a board never rises.

    Args:
        boards: changed in place.
        rules: what a change must respect.
        goals: lockstep costs that cannot be beaten, shape (J,); a large board stops within 1e-3 of its own.
        max_swaps: swaps looked at, a bound on the time of each board.
        tolerance: leave a column whose fullest cell is within this share of its mean; None for one that small boards
            get exactly and large ones within 2e-4.
    """
    if tolerance is None:
        tolerance = 1e-9 if boards.num_rows <= SMALL else 2e-4
    near = 1e-9 if boards.num_rows <= SMALL else 1e-3
    for j in range(boards.num_boards):
        goal = 0.0 if goals is None else float(goals[j]) * (1 + near)
        stuck = np.zeros(boards.num_columns, dtype=np.bool_)
        looked_at = 0
        changed = False
        while looked_at < max_swaps and (goals is None or boards.lockstep_of(j) > goal):
            swaps, better = _step(boards, j, rules, stuck, tolerance)
            looked_at += swaps
            changed |= better
            if not swaps:  # another sweep over the columns, if this one changed something
                if not changed:
                    break
                changed = False
                stuck[:] = False


def _step(boards: Boards, j: int, rules: Rules, stuck: BoolArray, tolerance: float) -> tuple[int, bool]:
    """Try the column with the most to win: how many swaps were looked at, 0 if none is left, and if one was made."""
    load = boards.load[j]
    columns = load.reshape(boards.num_columns, boards.num_ranks)
    top = columns.max(axis=1)
    slack: FloatArray = np.where(stuck, -1.0, top - columns.mean(axis=1))
    column = int(slack.argmax())
    if slack[column] <= tolerance * top[column]:
        return 0, False
    cell = column * boards.num_ranks + int(columns[column].argmax())
    second = float(np.partition(columns[column], -2)[-2])
    column_top = top[boards.column_of]
    swaps = Swaps.of(boards, j, cell, rules)
    grown = load[swaps.partner_cell] + swaps.shift
    here: FloatArray = np.maximum(second, load[cell] - swaps.shift)
    in_column = boards.column_of[swaps.partner_cell] == column
    here = np.where(in_column, np.maximum(here, grown), here)
    there: FloatArray = np.where(in_column, 0.0, np.maximum(0.0, grown - column_top[swaps.partner_cell]))
    change: FloatArray = np.where(swaps.allowed, here - load[cell] + there, 0.0)
    a, b = divmod(int(change.argmin()), change.shape[1])
    better = bool(change[a, b] < -1e-9 * top[column])
    if better:
        swaps.apply(boards, j, a, b)
    stuck[column] = not better
    return swaps.shift.size + _COST_OF_A_STEP, better


def kick(boards: Boards, rules: Rules, *, goals: FloatArray, num_kicks: int) -> None:
    """Small boards, searched harder: exact steps from kicked copies of the best layout.

    An iterated local search (H. R. Lourenço, O. C. Martin and T. Stützle, in Handbook of Metaheuristics, 2003). One row
    more or less matters where a micro-batch holds two or three. Boards of more than ``SMALL`` rows stay as they are.
    The lockstep cost of a board never rises. ``goals``, shape (J,), are lockstep costs that cannot be beaten.
    """
    if boards.num_rows > SMALL or boards.num_ranks == 1:
        return
    best: IntArray = np.array(boards.cell, dtype=np.int64)
    for j in range(boards.num_boards):
        board = boards.select(np.array([j]))
        draw = np.random.RandomState(0)  # its stream is frozen, so that every machine kicks alike
        cost, goal = board.lockstep_of(0), goals[j : j + 1]
        for turn in range(num_kicks):
            if cost <= goal[0] * (1 + 1e-9):
                break
            for _ in range(3 + turn % 4):
                swaps = Swaps.of(board, 0, int(draw.randint(board.num_cells)), rules)
                allowed = np.flatnonzero(swaps.allowed)
                if allowed.size:
                    swaps.apply(board, 0, *divmod(int(draw.choice(allowed)), swaps.partner_row.size))
            polish(board, rules, goals=goal)
            if board.lockstep_of(0) < cost * (1 - 1e-12):
                cost, best[j] = board.lockstep_of(0), board.cell[0]
            else:
                board.place(best[j : j + 1])
    boards.place(best)
