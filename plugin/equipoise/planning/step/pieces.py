"""What the search lays out, and what may become of it: the constraint that is plugged into the search.

A piece is a row, or a whole group where that must be in one micro-batch. Where groups are kept on a rank, its pieces
have that rank as their home.
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
        kind: shape (p,); pieces of one kind only are swapped between ranks.
        tied: group of each row, shape (n,), a padding row being one of its own; None where nothing is tied.
        home: rank of each piece, shape (p,), -1 for padding; None where the search chooses.
        cell: where the search starts, shape (p,), if micro-batches of fixed rows were filled with whole groups.
    """

    mini: MiniBatch
    board: MiniBatch
    kind: IntArray
    tied: IntArray | None = None
    home: IntArray | None = None
    cell: IntArray | None = None

    @classmethod
    def of_rows(cls, mini: MiniBatch) -> Pieces:
        """Rows that may go anywhere; padding changes ranks with padding only."""
        return cls(mini=mini, board=mini, kind=mini.padding.astype(np.int64))

    def rules(self, num_columns: int, spec: StepSpec) -> Rules:
        """Pieces change micro-batch within their rank, but where each holds a fixed number of rows."""
        fixed = num_columns == 1 or self.mini.fixed_rows is not None
        return Rules(cap=spec.cap, moves="none" if fixed else "rank", alike=self.cell is not None)

    def goal(self, spec: StepSpec) -> float:
        """Lockstep cost that no layout of the pieces is below."""
        return max(self.mini.bound(spec.cap), float(self.board.cost.max()))

    def layout(self, num_columns: int, cell: IntArray) -> Layout:
        """The rows where these cells of the pieces put them."""
        whole = self.tied is not None and self.board.cost.size < self.mini.cost.size
        return Layout(self.mini, num_columns, cell[self.tied] if whole else cell)

    def allow(self, layout: Layout, spec: StepSpec) -> bool:
        """Whether the layout is legal, in a number of micro-batches that may be, and keeps what is tied together."""
        if layout.num_columns % spec.micro_batch_multiple or not layout.legal(spec.cap):
            return False
        if self.tied is None:
            return True
        place = layout.cell if spec.keep_groups == "micro" else layout.cell % layout.mini.dp_size
        first = np.empty(int(self.tied.max()) + 1, dtype=np.int64)
        first[self.tied] = place
        return bool((first[self.tied] == place).all())


def boards_of(pieces: list[Pieces], cells: list[list[IntArray]], num_columns: int) -> Boards:
    """Boards of these cells, those of the first pieces first; all pieces have as many starts and sizes."""
    each = [one for one, starts in zip(pieces, cells, strict=True) for _ in starts]
    kind = np.stack([one.kind for one in each])
    return Boards(
        np.stack([one.board.cost for one in each]),
        np.stack([one.board.tokens for one in each]),
        np.stack([cell for starts in cells for cell in starts]),
        num_ranks=pieces[0].mini.dp_size,
        num_columns=num_columns,
        kind=None if (kind == kind[0, 0]).all() else kind,
    )
