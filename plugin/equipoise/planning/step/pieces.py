"""What the search lays out and under which constraints.

A piece is a row, or a whole group if groups must be in one micro-batch. If groups are kept on a rank, that rank is the
home of their pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equipoise._arrays import IntArray
from equipoise.planning.partition.board import Boards, Rules
from equipoise.planning.step.layout import Layout, MiniBatch
from equipoise.planning.step.spec import StepSpec


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces of one mini-batch.

    Attributes:
        mini: the rows.
        board: the pieces, as rows of a mini-batch; its ``rows`` and ``real_rows`` count pieces.
        kind: shape (p,); ranks only swap pieces of the same kind.
        tied: group of each row, shape (n,), where each padding row is its own group; None without groups.
        home: rank of each piece, shape (p,), -1 for padding; None if the search chooses.
        cell: initial cells, shape (p,), if micro-batches of fixed size were filled with whole groups.
    """

    mini: MiniBatch
    board: MiniBatch
    kind: IntArray
    tied: IntArray | None = None
    home: IntArray | None = None
    cell: IntArray | None = None

    @classmethod
    def of_rows(cls, mini: MiniBatch) -> Pieces:
        """Rows that may go anywhere, except that padding only swaps ranks with padding."""
        return cls(mini=mini, board=mini, kind=mini.padding.astype(np.int64))

    def rules(self, num_columns: int, spec: StepSpec) -> Rules:
        """Pieces move within their rank, unless micro-batches have a fixed number of rows."""
        fixed = num_columns == 1 or self.mini.fixed_rows is not None
        return Rules(cap=spec.cap, moves="none" if fixed else "rank", alike=self.cell is not None)

    def goal(self, spec: StepSpec) -> float:
        """Lower bound on the lockstep cost of the pieces."""
        return max(self.mini.bound(spec.cap), float(self.board.cost.max()))

    def layout(self, num_columns: int, cell: IntArray) -> Layout:
        """The layout of the rows, given the cells of the pieces."""
        whole = self.tied is not None and self.board.cost.size < self.mini.cost.size
        return Layout(self.mini, num_columns, cell[self.tied] if whole else cell)

    def allow(self, layout: Layout, spec: StepSpec) -> bool:
        """Whether the layout is legal, has an allowed number of micro-batches and keeps groups together."""
        if layout.num_columns % spec.micro_batch_multiple or not layout.legal(spec.cap):
            return False
        if self.tied is None:
            return True
        place = layout.cell if spec.keep_groups == "micro" else layout.cell % layout.mini.dp_size
        first = np.empty(int(self.tied.max()) + 1, dtype=np.int64)
        first[self.tied] = place
        return bool((first[self.tied] == place).all())


def boards_of(pieces: list[Pieces], cells: list[IntArray], num_columns: int) -> Boards:
    """A board for each of the pieces, which all have the same size, and their cells."""
    kind = np.stack([one.kind for one in pieces])
    return Boards(
        np.stack([one.board.cost for one in pieces]),
        np.stack([one.board.tokens for one in pieces]),
        np.stack(cells),
        num_ranks=pieces[0].mini.dp_size,
        num_columns=num_columns,
        kind=None if (kind == kind[0, 0]).all() else kind,
    )
