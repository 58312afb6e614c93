"""The search: rounds of pairwise swaps over all boards at once, then exact steps at each column's fullest cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, iota
from equipoise.planning.partition.board import Boards, Pairs, Rules

_NUM_PARTNER_CELLS = (24, 96)
_MAX_SWAPS = 500_000  # looked at in one step
_COST_OF_A_STEP = 20_000  # in swaps: what the numpy calls of one step cost beside them


def even_out_loads(boards: Boards, rules: Rules, *, max_rounds: int = 48, tolerance: float = 2e-4) -> None:
    """Rounds of pairwise changes until columns are level, or nothing changes any more.

    Each change lowers the sum of squared excesses over the levels, so that the search ends by itself.

    Args:
        boards: changed in place.
        rules: what a change must respect.
        max_rounds: a bound on the time.
        tolerance: stop when every board's lockstep cost is within this share of its levels' sum.

    """
    active = np.ones(boards.num_boards, dtype=np.bool_)
    kinds: tuple[Pairs, ...] = ("any",) if boards.num_columns == 1 else ("column", "any")
    if boards.num_columns > 1 and rules.moves != "none":
        kinds = ("rank", *kinds)
    idle = 0
    before: FloatArray = np.full(boards.num_boards, np.inf)
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
        kind = kinds[turn % len(kinds)]
        changed = boards.even_out(
            boards.load - target,
            boards.cost,
            rules,
            active=active,
            pairs=kind,
            shift=turn // len(kinds),
            ceiling=target * (1 + 1e-9),
        )
        idle = 0 if changed else idle + 1
        if idle >= 4:
            return


def fit_cap(boards: Boards, rules: Rules, *, max_rounds: int = 8, max_steps: int = 96) -> BoolArray:
    """Bring every cell under the cap, where that can be found: rounds of pairwise changes, then exact steps.

    Args:
        boards: changed in place.
        rules: what a change must respect; without a cap everything fits.
        max_rounds: a bound on the time.
        max_steps: exact steps of each board, a bound on the time.

    Returns:
        Which boards fit, shape (J,).

    """
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
        ceiling: FloatArray = np.repeat(boards.longest_of_columns(), boards.num_ranks, axis=1)
        kind = kinds[turn % len(kinds)]
        boards.even_out(excess, weight, free, active=over, pairs=kind, shift=turn // len(kinds), ceiling=ceiling)
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
        swaps = _Swaps.of(boards, j, cell, free, None)
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
            swaps.apply(boards, j, cell, a, b)
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

    Args:
        boards: changed in place; the lockstep cost of a board never rises.
        rules: what a change must respect.
        goals: lockstep costs that cannot be beaten, shape (J,); a large board stops within 1e-3 of its own.
        max_swaps: swaps looked at, a bound on the time of each board.
        tolerance: leave a column whose fullest cell is within this share of its mean; None for one that small boards
            get exactly and large ones within 2e-4.

    """
    if tolerance is None:
        tolerance = 1e-9 if boards.num_rows <= 64 else 2e-4
    near = 1e-9 if boards.num_rows <= 64 else 1e-3
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
    """Try the column with the most to win.

    Returns:
        How many swaps were looked at, 0 once every column is level or stuck; and whether one was made.

    """
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
    looked_at = 0
    for among in _partner_cells(column_top - load):
        swaps = _Swaps.of(boards, j, cell, rules, among)
        looked_at += swaps.shift.size + _COST_OF_A_STEP
        grown = load[swaps.partner_cell] + swaps.shift
        here: FloatArray = np.maximum(second, load[cell] - swaps.shift)
        in_column = boards.column_of[swaps.partner_cell] == column
        here = np.where(in_column, np.maximum(here, grown), here)
        there: FloatArray = np.where(in_column, 0.0, np.maximum(0.0, grown - column_top[swaps.partner_cell]))
        change: FloatArray = np.where(swaps.allowed, here - load[cell] + there, 0.0)
        a, b = divmod(int(change.argmin()), change.shape[1])
        if change[a, b] < -1e-9 * top[column]:
            swaps.apply(boards, j, cell, a, b)
            return looked_at, True
    stuck[column] = True
    return looked_at, False


def _partner_cells(room: FloatArray) -> Iterator[IntArray | None]:
    """The cells with the most room, which nearly always hold the best partner; then more of them."""
    few, many = _NUM_PARTNER_CELLS
    if room.size <= 2 * few:
        yield None
        return
    order: IntArray = np.argsort(-room, kind="stable")
    yield order[:few]
    yield order[:many] if room.size > many else None


@dataclass(frozen=True)
class _Swaps:
    """All swaps of A rows of a cell with B rows elsewhere; a partner row of n stands for none, which makes it a move.

    Attributes:
        rows: shape (A,).
        partner_row: shape (B,).
        partner_cell: shape (B,).
        shift: cost that leaves the cell, shape (A, B).
        allowed: shape (A, B).

    """

    rows: IntArray
    partner_row: IntArray
    partner_cell: IntArray
    shift: FloatArray
    allowed: BoolArray

    @classmethod
    def of(cls, boards: Boards, j: int, cell: int, rules: Rules, among: IntArray | None) -> _Swaps:
        """Swaps of ``cell`` with the cells ``among``, or with all."""
        n = boards.num_rows
        rank_of, cost, count = boards.rank_of, boards.cost[j], boards.count[j]
        partner_row = iota(n) if among is None else boards.slots[j, among].ravel()
        partner_row = partner_row[partner_row != n]
        partner_cell = boards.cell[j, partner_row]
        if rules.moves != "none" and count[cell] > 1:
            targets = iota(boards.num_cells) if among is None else among
            if rules.moves == "rank":
                targets = targets[rank_of[targets] == rank_of[cell]]
            partner_row = np.concatenate([partner_row, np.full(targets.size, n, dtype=np.int64)])
            partner_cell = np.concatenate([partner_cell, targets])
        rows = _spread(boards.slots[j, cell, : count[cell]], cost, _MAX_SWAPS // partner_row.size)
        shift = cost[rows][:, None] - cost[partner_row]
        allowed: BoolArray = (shift > 0) & (partner_cell != cell)
        if rules.cap is not None:
            tokens = boards.tokens[j, rows][:, None] - boards.tokens[j, partner_row]
            lone_partner: BoolArray = (count[partner_cell] == 1) & (partner_row != n)
            allowed &= (boards.fill[j, cell] - tokens <= rules.cap) | (count[cell] == 1)
            allowed &= (boards.fill[j, partner_cell] + tokens <= rules.cap) | lone_partner
        if boards.kind is not None:
            alike: BoolArray = boards.kind[j, rows][:, None] == boards.kind[j, partner_row]
            allowed &= alike if rules.alike else alike | (rank_of[partner_cell] == rank_of[cell])
        return cls(rows, partner_row, partner_cell, shift, allowed)

    def apply(self, boards: Boards, j: int, cell: int, a: int, b: int) -> None:
        """Make the swap or move of row a with partner b."""
        other = int(self.partner_cell[b])
        at = int((boards.slots[j, cell] == self.rows[a]).argmax())
        if self.partner_row[b] == boards.num_rows:
            boards.ensure_room(int(boards.count[j, other]) + 1)
            at_other = int(boards.count[j, other])
        else:
            at_other = int((boards.slots[j, other] == self.partner_row[b]).argmax())
        boards.exchange_one(j, cell, at, other, at_other)


def _spread(rows: IntArray, cost: FloatArray, most: int) -> IntArray:
    """At most so many of the rows (but one at least), from the cheapest to the dearest."""
    if rows.size <= most:
        return rows
    rising = rows[np.argsort(cost[rows], kind="stable")]
    return rising[iota(max(most, 1)) * rows.size // max(most, 1)]
