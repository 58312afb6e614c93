"""All swaps and moves of one cell's rows, as arrays of candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, iota
from equipoise.planning.partition.board import Boards, Rules

_MAX_SWAPS = 500_000  # evaluated in one step


@dataclass(frozen=True)
class Swaps:
    """Swaps of A rows of a cell with B partners; a partner row of n means none, which makes it a move.

    ``rows`` has shape (A,), ``partner_row`` and ``partner_cell`` (B,); ``shift``, the cost that leaves the cell, and
    ``allowed`` have shape (A, B).
    """

    cell: int
    rows: IntArray
    partner_row: IntArray
    partner_cell: IntArray
    shift: FloatArray
    allowed: BoolArray

    @classmethod
    def of(cls, boards: Boards, j: int, cell: int, rules: Rules) -> Swaps:
        """Swaps of ``cell`` with all other cells."""
        n = boards.num_rows
        rank_of, cost, count = boards.rank_of, boards.cost[j], boards.count[j]
        partner_row, partner_cell = iota(n), boards.cell[j]
        if rules.moves != "none" and count[cell] > 1:
            targets = iota(boards.num_cells)
            if rules.moves == "rank":
                targets = targets[rank_of == rank_of[cell]]
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
        return cls(cell, rows, partner_row, partner_cell, shift, allowed)

    def apply(self, boards: Boards, j: int, a: int, b: int) -> None:
        """Swap row a with partner b, or move it."""
        row, partner, there = int(self.rows[a]), int(self.partner_row[b]), int(self.partner_cell[b])
        if partner != boards.num_rows:
            boards.swap_rows(j, row, partner)
            return
        boards.ensure_room(int(boards.count[j, there]) + 1)
        at = int((boards.slots[j, self.cell] == row).argmax())
        boards.swap_one(j, self.cell, at, there, int(boards.count[j, there]))


def _spread(rows: IntArray, cost: FloatArray, most: int) -> IntArray:
    """At most ``most`` of the rows (but at least one), evenly spaced by cost."""
    if rows.size <= most:
        return rows
    rising = rows[np.argsort(cost[rows], kind="stable")]
    return rising[iota(max(most, 1)) * rows.size // max(most, 1)]
