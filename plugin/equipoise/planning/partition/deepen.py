"""Small boards, searched harder: steepest descent over every swap and move, restarted from kicked copies of the best.

An iterated local search (H. R. Lourenço, O. C. Martin and T. Stützle, in Handbook of Metaheuristics, 2003). One row
more or less matters where a micro-batch holds two or three, and there are few enough swaps to look at all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, int_sums, iota, sums
from equipoise.planning.partition.board import Rules

MAX_ROWS = 64
"""Boards with more rows are left to the search from their fullest cells."""

_STEP = 20_000  # what a step costs beside its candidates, in loads looked at


@dataclass(frozen=True, kw_only=True)
class SmallBoard:
    """One mini-batch, as :class:`equipoise.planning.partition.board.Boards` numbers its cells.

    Attributes:
        cost: shape (n,).
        tokens: shape (n,).
        kind: shape (n,); rows of one kind only are swapped between ranks.
        num_ranks: cells of a column.
        num_columns: columns.
    """

    cost: FloatArray
    tokens: IntArray
    kind: IntArray
    num_ranks: int
    num_columns: int

    @property
    def num_cells(self) -> int:
        """Cells of the board."""
        return self.num_ranks * self.num_columns

    def lockstep(self, cell: IntArray) -> float:
        """Σ over columns of the largest load."""
        load = sums(cell, self.cost, self.num_cells)
        return float(load.reshape(self.num_columns, self.num_ranks).max(axis=1).sum())


def deepen(board: SmallBoard, cell: IntArray, rules: Rules, *, goal: float, max_loads: int) -> IntArray:
    """A layout at least as good as ``cell``.

    Args:
        board: the rows.
        cell: cell of each row, shape (n,), within the rules.
        rules: what a change must respect.
        goal: lockstep cost that cannot be beaten; the search stops there.
        max_loads: loads looked at, a bound on the time (about 4 ns each).

    Returns:
        Cell of each row, shape (n,).
    """
    search = _Search(board, rules)
    draw = np.random.RandomState(0)  # its stream is frozen, so that every machine kicks alike
    best, best_cost = _copy(cell), board.lockstep(cell)
    state = _copy(cell)
    kicks = 0
    while best_cost > goal * (1 + 1e-9) and search.looked_at < max_loads:
        state = search.descend(state)
        cost = board.lockstep(state)
        if cost < best_cost * (1 - 1e-12):
            best, best_cost = _copy(state), cost
        state = _copy(best)
        kicks += 1
        for _ in range(2 + kicks % 3):
            search.kick(state, draw)
    return best


def _copy(cell: IntArray) -> IntArray:
    return np.array(cell, dtype=np.int64)


class _Search:
    """All swaps of two rows, then all moves of one row to another cell, as arrays of candidates."""

    def __init__(self, board: SmallBoard, rules: Rules) -> None:
        self.board, self.rules = board, rules
        n, cells = board.cost.size, board.num_cells
        first, second = np.triu_indices(n, 1)
        self.row_a: IntArray = np.asarray(first, dtype=np.int64)
        self.row_b: IntArray = np.asarray(second, dtype=np.int64)
        self.num_swaps = self.row_a.size
        if rules.moves != "none":
            self.row_a = np.concatenate([self.row_a, np.repeat(iota(n), cells)])
        self.target: IntArray = np.tile(iota(cells), n) if rules.moves != "none" else np.empty(0, dtype=np.int64)
        self.alike: BoolArray = board.kind[first] == board.kind[second]
        self.rank_of = iota(cells) % board.num_ranks
        self.looked_at = 0
        # the sum of squares breaks ties between layouts of equal cost, far below any difference in cost
        scale = float(board.cost.sum()) or 1.0
        self.tie = 1e-9 / scale

    def candidates(self, cell: IntArray) -> tuple[IntArray, IntArray, FloatArray, IntArray, BoolArray]:
        """From-cell, to-cell, cost and tokens that leave the first for the second, and which are allowed."""
        board, rules = self.board, self.rules
        a = cell[self.row_a]
        b = np.concatenate([cell[self.row_b], self.target])
        cost: FloatArray = np.array(board.cost[self.row_a])
        tokens: IntArray = np.array(board.tokens[self.row_a])
        cost[: self.num_swaps] -= board.cost[self.row_b]
        tokens[: self.num_swaps] -= board.tokens[self.row_b]
        same_rank: BoolArray = self.rank_of[a] == self.rank_of[b]
        count = counts(cell, board.num_cells)
        allowed: BoolArray = a != b
        allowed[: self.num_swaps] &= self.alike if rules.alike else self.alike | same_rank[: self.num_swaps]
        may_leave: BoolArray = count[a[self.num_swaps :]] > 1
        allowed[self.num_swaps :] &= may_leave if rules.moves == "any" else may_leave & same_rank[self.num_swaps :]
        if rules.cap is not None:
            fill = int_sums(cell, board.tokens, board.num_cells)
            lone_b: BoolArray = count[b] == 1
            lone_b[self.num_swaps :] = False
            allowed &= (fill[a] - tokens <= rules.cap) | (count[a] == 1)
            allowed &= (fill[b] + tokens <= rules.cap) | lone_b
        return a, b, cost, tokens, allowed

    def descend(self, cell: IntArray) -> IntArray:
        """Take the best candidate until none is better."""
        board = self.board
        cell = _copy(cell)
        while True:
            a, b, cost, _, allowed = self.candidates(cell)
            load = sums(cell, board.cost, board.num_cells)
            now = self._value(load[None])[0]
            pick = np.flatnonzero(allowed)
            self.looked_at += pick.size * board.num_cells + _STEP
            if not pick.size:
                return cell
            after: FloatArray = np.repeat(load[None], pick.size, axis=0)
            line = iota(pick.size)
            after[line, a[pick]] -= cost[pick]
            after[line, b[pick]] += cost[pick]
            value = self._value(after)
            best = int(value.argmin())
            if value[best] >= now * (1 - 1e-12):
                return cell
            self._apply(cell, int(pick[best]), a, b)

    def kick(self, cell: IntArray, draw: np.random.RandomState) -> None:
        """Take any allowed candidate."""
        a, b, _, _, allowed = self.candidates(cell)
        pick = np.flatnonzero(allowed)
        self.looked_at += _STEP
        if pick.size:
            self._apply(cell, int(pick[int(draw.randint(pick.size))]), a, b)

    def _apply(self, cell: IntArray, which: int, a: IntArray, b: IntArray) -> None:
        cell[self.row_a[which]] = b[which]
        if which < self.num_swaps:
            cell[self.row_b[which]] = a[which]

    def _value(self, load: FloatArray) -> FloatArray:
        columns = load.reshape(load.shape[0], self.board.num_columns, self.board.num_ranks)
        lockstep: FloatArray = columns.max(axis=2).sum(axis=1)
        return lockstep + self.tie * (load**2).sum(axis=1)
