"""A mini-batch as the planner sees it, and its layout: the cell of each row on a grid of micro-batches × ranks.

Cell c belongs to rank c % dp_size and column c // dp_size; a column is a micro-batch that all ranks run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, int_sums, iota, positions, sums
from equipoise.planning.partition.bounds import mini_batch_bound
from equipoise.planning.step.composition import rank_rows
from equipoise.planning.step.spec import StepSpec
from equipoise.planning.workload.padded import MicroBatchCost, micro_batch_cost


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """Rows of one optimizer step, in their incoming order, and how many each rank gets.

    Attributes:
        cost: shape (n,).
        tokens: shape (n,).
        padding: True for padding rows, shape (n,).
        rows: rows of each rank, shape (dp_size,).
        real_rows: rows of each rank without padding, shape (dp_size,).
        fixed_rows: rows of every micro-batch, or None if the token cap decides.
        padded: cost model of micro-batches whose rows are padded to the longest one; None if costs of rows add up.
    """

    cost: FloatArray
    tokens: IntArray
    padding: BoolArray
    rows: IntArray
    real_rows: IntArray
    fixed_rows: int | None
    padded: MicroBatchCost | None = None

    @property
    def dp_size(self) -> int:
        """Number of ranks."""
        return self.rows.size

    def bound(self, cap: int | None) -> float:
        """Lower bound on the lockstep cost (see :mod:`equipoise.planning.partition.bounds`)."""
        return mini_batch_bound(
            self.cost, self.tokens, num_ranks=self.dp_size, cap=cap, rows_per_rank=int(self.rows.min())
        )


def mini_batches(
    members: list[IntArray],
    cost: FloatArray,
    tokens: IntArray,
    padding: BoolArray,
    spec: StepSpec,
    padded: MicroBatchCost | None = None,
) -> list[MiniBatch]:
    """Each mini-batch, given its row ids, ``members``."""
    real = np.array([int((~padding[rows]).sum()) for rows in members])
    quota, real_quota = rank_rows(np.array([rows.size for rows in members]), real, spec.dp_size)
    return [
        MiniBatch(
            cost=cost[rows],
            tokens=tokens[rows],
            padding=padding[rows],
            rows=quota[j],
            real_rows=real_quota[j],
            fixed_rows=spec.micro_batch_size_per_gpu,
            padded=padded,
        )
        for j, rows in enumerate(members)
    ]


@dataclass(frozen=True)
class Layout:
    """Cell of each row of one mini-batch, shape (n,)."""

    mini: MiniBatch
    num_columns: int
    cell: IntArray

    @property
    def num_cells(self) -> int:
        """Number of micro-batches over all ranks."""
        return self.num_columns * self.mini.dp_size

    @cached_property
    def _loads(self) -> FloatArray:
        model, tokens = self.mini.padded, self.mini.tokens
        if model is None:
            return sums(self.cell, self.mini.cost, self.num_cells)
        cells = positions(self.cell, self.num_cells)
        return np.array([micro_batch_cost(model, tokens[rows]) if rows.size else 0.0 for rows in cells])

    def loads(self) -> FloatArray:
        """Cost of each cell, shape (num_columns, dp_size)."""
        return self._loads.reshape(self.num_columns, self.mini.dp_size)

    def lockstep(self) -> float:
        """Σ over columns of the largest load."""
        return float(self.loads().max(axis=1).sum())

    def rank(self) -> float:
        """Largest total of a rank."""
        return float(self.loads().sum(axis=0).max())

    def value(self, spec: StepSpec) -> float:
        """What the plan minimizes: cost by the spec's objective, plus the overhead of each micro-batch."""
        cost = self.lockstep() if spec.objective == "lockstep" else self.rank()
        return cost + spec.micro_batch_overhead * self.num_columns

    def tokens(self) -> IntArray:
        """Tokens of each cell, including padding if rows are padded, shape (num_cells,)."""
        if self.mini.padded is None:
            return int_sums(self.cell, self.mini.tokens, self.num_cells)
        longest = np.zeros(self.num_cells, dtype=np.int64)
        np.maximum.at(longest, self.cell, self.mini.tokens)
        return longest * counts(self.cell, self.num_cells)

    def crowded_tokens(self) -> int:
        """Tokens of the fullest cell with more than one row; 0 if there is none."""
        return int(np.where(counts(self.cell, self.num_cells) > 1, self.tokens(), 0).max())

    def legal(self, cap: int | None) -> bool:
        """Whether no cell is empty and no cell of more than one row is above the cap."""
        if counts(self.cell, self.num_cells).min() == 0:
            return False
        return cap is None or self.crowded_tokens() <= cap


def dispatch_order(layouts: list[Layout], members: list[IntArray]) -> tuple[IntArray, tuple[IntArray, ...]]:
    """Row ids by rank, then mini-batch, then micro-batch; and the row count of each micro-batch.

    The most expensive micro-batch of a mini-batch runs first, so that a step that runs out of memory does so early.

    Returns:
        The order, shape (n,), and for each mini-batch an array of shape (dp_size, micro-batches); all read-only.
    """
    rank_of: list[IntArray] = []
    place_of: list[IntArray] = []
    sizes: list[IntArray] = []
    for layout in layouts:
        ranks, columns = layout.mini.dp_size, layout.num_columns
        place = iota(columns)
        place[np.argsort(-layout.loads().max(axis=1), kind="stable")] = iota(columns)
        rank_of.append(layout.cell % ranks)
        place_of.append(place[layout.cell // ranks])
        sizes.append(counts(rank_of[-1] * columns + place_of[-1], ranks * columns).reshape(ranks, columns))
    row = np.concatenate(members)
    step = np.repeat(iota(len(members)), [rows.size for rows in members])
    order = row[np.lexsort((row, np.concatenate(place_of), step, np.concatenate(rank_of)))]
    for array in (order, *sizes):
        array.flags.writeable = False
    return order, tuple(sizes)
