"""The search: rounds of pairwise swaps on all boards at once, then steepest steps and kicks on each."""

from __future__ import annotations

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray
from equipoise.planning.partition.board import Boards, Pairs, Rules
from equipoise.planning.partition.swaps import Swaps

SMALL = 64
"""Boards with at most this many rows are searched until nothing improves, then again from kicked copies."""

_COST_OF_A_STEP = 20_000  # overhead of a step's numpy calls, in swaps


def even_out_loads(boards: Boards, rules: Rules, *, max_rounds: int = 48, tolerance: float = 2e-4) -> None:
    """Rounds of pairwise changes until the columns are level or nothing changes.

    Each change lowers the sum of squared excesses over the targets, so the search ends; it ends early once every
    board's lockstep cost is within ``tolerance`` of the sum of its targets.
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


def fit_cap(boards: Boards, rules: Rules, *, max_rounds: int = 96) -> BoolArray:
    """Bring every cell under the cap by rounds of pairwise changes; which boards fit, shape (J,)."""
    if rules.cap is None:
        return np.ones(boards.num_boards, dtype=np.bool_)
    free = Rules(cap=None, moves=rules.moves, alike=rules.alike)
    weight = boards.tokens.astype(np.float64)
    kinds: tuple[Pairs, ...] = ("any",) if rules.moves == "none" else ("rank", "any")
    over = _over_cap(boards, rules.cap)
    for turn in range(max_rounds):
        if not over.any():
            break
        excess = boards.fill.astype(np.float64)
        kind = kinds[turn % len(kinds)]
        boards.even_out(excess, weight, free, active=over, pairs=kind, shift=turn // len(kinds))
        over = _over_cap(boards, rules.cap)
    return ~over


def _over_cap(boards: Boards, cap: int) -> BoolArray:
    """Boards with a cell of more than one row above the cap, shape (J,)."""
    return np.asarray(((boards.fill > cap) & (boards.count > 1)).any(axis=1), dtype=np.bool_)


def polish(
    boards: Boards,
    rules: Rules,
    *,
    goals: FloatArray | None = None,
    max_swaps: int = 15_000_000,
    tolerance: float | None = None,
) -> None:
    """Steepest descent on each board, from the fullest cell of the column that is furthest above its mean.

    The lockstep cost of a board never rises.

    Args:
        boards: changed in place.
        rules: what a change must respect.
        goals: lower bounds on the lockstep costs, shape (J,); a large board stops within 1e-3 of its own.
        max_swaps: swaps to evaluate, which bounds the time of each board.
        tolerance: skip a column whose fullest cell is within this share of its mean; None for 1e-9 on small boards
            and 2e-4 on large ones.
    """
    if tolerance is None:
        tolerance = 1e-9 if boards.num_rows <= SMALL else 2e-4
    near = 1e-9 if boards.num_rows <= SMALL else 1e-3
    for j in range(boards.num_boards):
        goal = 0.0 if goals is None else float(goals[j]) * (1 + near)
        stuck = np.zeros(boards.num_columns, dtype=np.bool_)
        evaluated = 0
        changed = False
        while evaluated < max_swaps and (goals is None or boards.lockstep_of(j) > goal):
            swaps, better = _step(boards, j, rules, stuck, tolerance)
            evaluated += swaps
            changed |= better
            if not swaps:  # sweep again over the columns if this sweep changed something
                if not changed:
                    break
                changed = False
                stuck[:] = False


def _step(boards: Boards, j: int, rules: Rules, stuck: BoolArray, tolerance: float) -> tuple[int, bool]:
    """Try the column with the most to gain: the swaps evaluated, 0 if no column is left; and whether one helped."""
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
    """Search small boards harder: steepest descent from kicked copies of the best layout.

    An iterated local search (H. R. Lourenço, O. C. Martin and T. Stützle, in Handbook of Metaheuristics, 2003). It pays
    where a micro-batch holds two or three rows. Boards of more than ``SMALL`` rows are left alone. The lockstep cost of
    a board never rises. ``goals``, shape (J,), are lower bounds on the lockstep costs.
    """
    if boards.num_rows > SMALL or boards.num_ranks == 1:
        return
    best: IntArray = np.array(boards.cell, dtype=np.int64)
    for j in range(boards.num_boards):
        board = boards.select(np.array([j]))
        draw = np.random.RandomState(0)  # numpy keeps its stream stable across versions
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
