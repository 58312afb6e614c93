"""The board: rows in cells, cells in columns, and the swaps and moves that balance them.

A board is one mini-batch: ``num_ranks`` × ``num_columns`` cells, where a column is a micro-batch that all ranks run
together. Cell c belongs to rank c % num_ranks and column c // num_ranks. A partition into k parts is a board with one
column. Boards of one shape are searched together, because a numpy call costs the same for one board as for sixteen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, int_sums, iota, sums

Moves = Literal["none", "rank", "any"]
Pairs = Literal["column", "rank", "any"]

_MAX_CANDIDATES = 4_000_000  # swaps evaluated in one call: bounds its memory
_MAX_WIDTH = 256  # rows of a cell considered in one round; the others are no better


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a swap or move must respect.

    Attributes:
        cap: the most tokens in a cell; None for no cap. A single row may exceed it, because rows are never split.
        moves: whether a row may change cells without a swap: never ("none"), between cells of one rank ("rank", which
            keeps the rank's row count), or between any cells ("any").
        alike: swap only rows of the same kind, even within a rank.
    """

    cap: int | None = None
    moves: Moves = "none"
    alike: bool = False


class Boards:
    """J boards of n rows in K cells, with loads that are kept up to date.

    ``cost``, ``tokens``, ``cell`` and ``kind`` have shape (J, n). Ranks only swap rows of the same kind (None if all
    rows are of one kind).
    """

    def __init__(
        self,
        cost: FloatArray,
        tokens: IntArray,
        cell: IntArray,
        *,
        num_ranks: int,
        num_columns: int,
        kind: IntArray | None = None,
    ) -> None:
        self.num_boards, self.num_rows = int(cost.shape[0]), int(cost.shape[1])
        self.num_ranks, self.num_columns = num_ranks, num_columns
        self.num_cells = num_ranks * num_columns
        # A last row of cost 0 marks the unused slots of a cell.
        self.cost = np.concatenate([cost, np.zeros((self.num_boards, 1))], axis=1)
        self.tokens = np.concatenate([tokens, np.zeros((self.num_boards, 1), dtype=np.int64)], axis=1)
        self.kind = None if kind is None else np.concatenate([kind, kind[:, :1]], axis=1)
        self.rank_of: IntArray = iota(self.num_cells) % num_ranks
        self.column_of: IntArray = iota(self.num_cells) // num_ranks
        self.place(cell)

    def place(self, cell: IntArray) -> None:
        """Put every row into the given cell, shape (J, n)."""
        self.cell: IntArray = np.array(cell, dtype=np.int64)
        n, shape = self.num_rows, (self.num_boards, self.num_cells)
        flat: IntArray = (self.cell + iota(self.num_boards)[:, None] * self.num_cells).ravel()
        bins = self.num_boards * self.num_cells
        self.count: IntArray = counts(flat, bins).reshape(shape)
        self.load: FloatArray = sums(flat, self.cost[:, :n].ravel(), bins).reshape(shape)
        self.fill: IntArray = int_sums(flat, self.tokens[:, :n].ravel(), bins).reshape(shape)
        self._lay_out(int(self.count.max()) + 4)

    def _lay_out(self, width: int) -> None:
        boards, n = self.num_boards, self.num_rows
        self.slots: IntArray = np.full((boards, self.num_cells, width), n, dtype=np.int64)
        order = np.argsort(self.cell, axis=1, kind="stable")
        cells: IntArray = np.take_along_axis(self.cell, order, axis=1)
        starts: IntArray = np.cumsum(self.count, axis=1) - self.count
        place: IntArray = iota(n)[None, :] - np.take_along_axis(starts, cells, axis=1)
        self.slots[iota(boards)[:, None], cells, place] = order

    def select(self, boards: IntArray) -> Boards:
        """A copy of the boards with these indices, shape (J',)."""
        cost, tokens = self.cost[boards, :-1], self.tokens[boards, :-1]
        kind = None if self.kind is None else self.kind[boards, :-1]
        grid = {"num_ranks": self.num_ranks, "num_columns": self.num_columns}
        return Boards(cost, tokens, self.cell[boards], kind=kind, **grid)

    def ensure_room(self, width: int) -> None:
        """Give every cell at least ``width`` slots."""
        if width > self.slots.shape[2]:
            self._lay_out(width + 4)

    def columns(self) -> FloatArray:
        """Loads by column, shape (J, num_columns, num_ranks)."""
        return self.load.reshape(self.num_boards, self.num_columns, self.num_ranks)

    def lockstep(self) -> FloatArray:
        """Σ over columns of the largest load, shape (J,)."""
        return self.columns().max(axis=2).sum(axis=1)

    def lockstep_of(self, j: int) -> float:
        """Lockstep cost of one board."""
        return float(self.load[j].reshape(self.num_columns, self.num_ranks).max(axis=1).sum())

    def targets(self) -> FloatArray:
        """Target load of each cell, shape (J, K).

        A column costs at least its most expensive row, and the others share the rest: the target is the larger of that
        row and a water line, the same for all columns, at which the targets add up to the total cost.
        """
        boards = iota(self.num_boards)
        by_column = self.slots.reshape(self.num_boards, self.num_columns, -1)
        largest: FloatArray = self.cost[boards[:, None, None], by_column].max(axis=2)
        falling = -np.sort(-largest, axis=1)
        total = self.load.sum(axis=1) / self.num_ranks
        rest = np.subtract.accumulate(np.column_stack([total, falling[:, :-1]]), axis=1)
        line = rest / np.arange(self.num_columns, 0, -1)
        above: BoolArray = line >= falling  # the right line is above all the rows below it
        water: FloatArray = np.where(above.any(axis=1), line[boards, above.argmax(axis=1)], 0.0)
        return np.repeat(np.maximum(largest, water[:, None]), self.num_ranks, axis=1)

    def even_out(
        self, excess: FloatArray, weight: FloatArray, rules: Rules, *, active: BoolArray, pairs: Pairs, shift: int
    ) -> int:
        """One round: pair full cells with empty ones, apply the best swap or move of each pair, and count the changes.

        Args:
            excess: shape (J, K), the load of each cell above its target.
            weight: shape (J, n + 1), what a row adds to ``excess``; 0 for an unused slot.
            rules: what a change must respect.
            active: boards to change, shape (J,).
            pairs: which cells are paired: those of one column, those of one rank, or any.
            shift: rotates the partners, so that each round tries other pairs.
        """
        board, full, empty = pair = self._pairs(excess, pairs, shift)
        gap = excess[board, full] - excess[board, empty]
        width = np.maximum(self.count[board, full], self.count[board, empty]) + (rules.moves != "none")
        keep = np.flatnonzero(active[board] & (gap > 1e-9 * (1.0 + np.abs(excess[board, full]))))
        if not keep.size:
            return 0
        self.ensure_room(int(width[keep].max()))
        keep = keep[np.argsort(width[keep], kind="stable")]
        changed = at = 0
        while at < keep.size:  # pairs of similar width share a call
            widest = min(_MAX_WIDTH, int(width[keep[at]]) * 5 // 4 + 1, self.slots.shape[2])
            part = keep[at : at + max(1, _MAX_CANDIDATES // widest**2)]
            if widest < _MAX_WIDTH:
                part = part[width[part] <= widest]
            at += part.size
            changed += self._swap_best(pair[:, part], gap[part], weight, rules, widest)
        return changed

    def _pairs(self, excess: FloatArray, pairs: Pairs, shift: int) -> IntArray:
        """Board, fuller cell and emptier cell of each pair, shape (3, P)."""
        grid = iota(self.num_cells).reshape(self.num_columns, self.num_ranks)
        cells = {"column": grid, "rank": np.swapaxes(grid, 0, 1), "any": grid.reshape(1, -1)}[pairs]
        values: FloatArray = excess[:, cells]
        rising: IntArray = np.argsort(values, axis=2, kind="stable")
        order: IntArray = cells[iota(len(cells))[:, None], rising]
        half = order.shape[2] // 2
        empty: IntArray = np.roll(order[:, :, :half], shift % max(half, 1), axis=2)
        full: IntArray = order[:, :, ::-1][:, :, :half]
        board: IntArray = np.broadcast_to(iota(self.num_boards)[:, None, None], full.shape)
        return np.stack([board, full, empty]).reshape(3, -1)

    def _swap_best(self, pair: IntArray, gap: FloatArray, weight: FloatArray, rules: Rules, width: int) -> int:
        """Apply the best swap or move of each pair, if any helps."""
        board, full, empty = pair
        out_rows = self.slots[board, full, :width]  # (P, W)
        in_rows = self.slots[board, empty, :width]
        leave, enter = self._weights_of_free_rows(pair, out_rows, in_rows, weight, rules)
        shift: FloatArray = leave[:, :, None] - enter[:, None, :]
        gain: FloatArray = np.subtract(gap[:, None, None], shift)
        gain *= shift  # half the decrease of the sum of squared excesses; -inf where the slot may not change
        self._forbid(gain, pair, out_rows, in_rows, rules)
        flat = gain.reshape(board.size, -1)
        best = flat.argmax(axis=1)
        won = flat[np.arange(board.size), best] > 1e-12 * gap * gap
        if won.any():
            self.swap(board[won], full[won], best[won] // width, empty[won], best[won] % width)
        return int(won.sum())

    def _weights_of_free_rows(
        self, pair: IntArray, out_rows: IntArray, in_rows: IntArray, weight: FloatArray, rules: Rules
    ) -> tuple[FloatArray, FloatArray]:
        """Weights of the rows of both cells, shapes (P, W); infinite for a slot that may not change.

        An unused slot of the emptier cell has weight 0 if the fuller cell may give a row away, which leaves it one.
        """
        board, full, empty = pair
        nobody = self.num_rows
        leave = np.where(out_rows != nobody, weight[board[:, None], out_rows], -np.inf)
        if rules.moves == "none":
            may_give = np.zeros(board.size, dtype=np.bool_)
        else:
            may_give = self.count[board, full] > 1
            if rules.moves == "rank":
                may_give &= self.rank_of[full] == self.rank_of[empty]
        open_slot = (in_rows != nobody) | may_give[:, None]
        return leave, np.where(open_slot, weight[board[:, None], in_rows], np.inf)

    def _forbid(self, gain: FloatArray, pair: IntArray, out_rows: IntArray, in_rows: IntArray, rules: Rules) -> None:
        """Set ``gain`` to -inf, in place, where the cap or the kinds forbid the change."""
        board, full, empty = pair
        if self.kind is not None:
            same_rank = self.rank_of[full] == self.rank_of[empty]
            alike = self.kind[board[:, None], out_rows][:, :, None] == self.kind[board[:, None], in_rows][:, None, :]
            gain[~(alike if rules.alike else alike | same_rank[:, None, None])] = -np.inf
        if rules.cap is None:
            return
        lone_full, lone_empty = self.count[board, full] == 1, self.count[board, empty] == 1
        least: FloatArray = np.where(lone_full, -np.inf, self.fill[board, full] - rules.cap)
        most: FloatArray = np.where(
            lone_empty[:, None] & (in_rows != self.num_rows), np.inf, (rules.cap - self.fill[board, empty])[:, None]
        )
        out_tokens, in_tokens = self.tokens[board[:, None], out_rows], self.tokens[board[:, None], in_rows]
        if (least <= -in_tokens.max()).all() and (out_tokens.max() <= most).all():
            return  # no pair is near the cap
        tokens = out_tokens[:, :, None] - in_tokens[:, None, :]
        gain[(tokens < least[:, None, None]) | (tokens > most[:, None, :])] = -np.inf

    def swap(self, board: IntArray, cell_a: IntArray, at_a: IntArray, cell_b: IntArray, at_b: IntArray) -> None:
        """Swap slot ``at_a`` of ``cell_a`` with slot ``at_b`` of ``cell_b``; if slot b is unused, that is a move.

        A cell may occur only once per board in one call.
        """
        a = self.slots[board, cell_a, at_a]
        b = self.slots[board, cell_b, at_b]
        moved = b == self.num_rows
        self.slots[board, cell_a, at_a] = b
        at_b = np.where(moved, self.count[board, cell_b], at_b)
        self.slots[board, cell_b, at_b] = a
        self.cell[board, a] = cell_b
        swapped = ~moved
        self.cell[board[swapped], b[swapped]] = cell_a[swapped]
        if moved.any():  # the last row of cell a fills the gap
            jm, am, im = board[moved], cell_a[moved], at_a[moved]
            last = self.count[jm, am] - 1
            self.slots[jm, am, im] = self.slots[jm, am, last]
            self.slots[jm, am, last] = self.num_rows
            self.count[jm, am] -= 1
            self.count[jm, cell_b[moved]] += 1
        cost = self.cost[board, a] - self.cost[board, b]
        tokens = self.tokens[board, a] - self.tokens[board, b]
        self.load[board, cell_a] -= cost
        self.load[board, cell_b] += cost
        self.fill[board, cell_a] -= tokens
        self.fill[board, cell_b] += tokens

    def swap_one(self, j: int, cell_a: int, at_a: int, cell_b: int, at_b: int) -> None:
        """``swap`` for two cells of one board, in a tenth of the time."""
        slots, count = self.slots[j], self.count[j]
        a, b = int(slots[cell_a, at_a]), int(slots[cell_b, at_b])
        self.cell[j, a] = cell_b
        if b == self.num_rows:
            last = int(count[cell_a]) - 1
            slots[cell_b, int(count[cell_b])] = a
            slots[cell_a, at_a] = slots[cell_a, last]
            slots[cell_a, last] = b
            count[cell_a] -= 1
            count[cell_b] += 1
        else:
            slots[cell_a, at_a], slots[cell_b, at_b] = b, a
            self.cell[j, b] = cell_a
        cost = self.cost[j, a] - self.cost[j, b]
        tokens = self.tokens[j, a] - self.tokens[j, b]
        self.load[j, cell_a] -= cost
        self.load[j, cell_b] += cost
        self.fill[j, cell_a] -= tokens
        self.fill[j, cell_b] += tokens

    def swap_rows(self, j: int, a: int, b: int) -> None:
        """Swap two rows of different cells of one board."""
        cell_a, cell_b = int(self.cell[j, a]), int(self.cell[j, b])
        at_a, at_b = (int((self.slots[j, c] == row).argmax()) for c, row in ((cell_a, a), (cell_b, b)))
        self.swap_one(j, cell_a, at_a, cell_b, at_b)
