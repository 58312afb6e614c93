"""Layouts for engines that pad each micro-batch to its longest row: rows of similar length together.

A tier is one column: the next longest rows, the same number on each rank. It costs its rows per rank times the cost of
its longest row, so only the cuts between tiers matter, and dynamic programming over positions finds the best ones for a
given number of columns. Ranks with shorter rows could run more of them at once; on small mini-batches, a search over
swaps and moves finds such layouts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, iota
from equipoise.planning.partition.pack import round_up
from equipoise.planning.partition.refine import SMALL
from equipoise.planning.step.layout import Layout, MiniBatch
from equipoise.planning.step.limits import fewest_columns, most_columns
from equipoise.planning.step.spec import StepSpec
from equipoise.planning.step.starts import halved
from equipoise.planning.workload.padded import MicroBatchCost, micro_batch_cost

_MAX_POSITIONS = 1024  # rows per rank up to which all cuts are considered; beyond, tiers are filled greedily
_MAX_CALLS = 12_000  # calls of the cost model in the search of all mini-batches


def searched(mini: MiniBatch, spec: StepSpec, num_minis: int) -> Layout | None:
    """The best tiers, improved by a descent if the mini-batch is small; None if no tiers are under the cap.

    Without an overhead, they use the fewest micro-batches: more would mean less padding, down to one row each. With
    it, they use as many as pay.
    """
    layout = by_tiers(mini, spec)
    if layout is None or mini.padded is None or mini.cost.size > SMALL or mini.dp_size == 1:
        return layout
    search = _Descent(layout, mini.padded, spec, _MAX_CALLS // num_minis)
    while search.calls < search.max_calls and search.sweep():
        pass
    better = Layout(mini, layout.num_columns, search.cell)
    return min((layout, better), key=lambda each: (each.value(spec), each.lockstep()))


def by_tiers(mini: MiniBatch, spec: StepSpec) -> Layout | None:
    """The best tiers in the fewest columns, or in more as long as each saves more than the overhead.

    None if no tiers are under the cap.
    """
    if mini.fixed_rows is not None:
        return _tiers(mini, list(range(0, int(mini.rows[0]), mini.fixed_rows)))
    if mini.rows.min() > _MAX_POSITIONS:
        layout = _tiers(mini, _full_cuts(mini, spec, fewest_columns(mini, spec)))
        return layout if layout.legal(spec.cap) and layout.num_columns % spec.micro_batch_multiple == 0 else None
    best: Layout | None = None
    for cuts in _best_cuts(mini, spec, fewest_columns(mini, spec)):
        layout = _tiers(mini, cuts)
        if not layout.legal(spec.cap):
            continue
        if best is not None and layout.value(spec) >= best.value(spec):
            break
        best = layout
        if spec.micro_batch_overhead == 0:
            break
    return best


def _best_cuts(mini: MiniBatch, spec: StepSpec, least: int) -> Iterator[list[int]]:
    """Where the cheapest tiers start on every rank, for each allowed number of columns from ``least`` on.

    best[c, q] is the least cost of the first q positions in c tiers: min over p of best[c - 1, p] + (q - p) · cost(p).
    """
    rows = int(mini.rows.min())
    extra = int(mini.rows.max()) - rows
    places = iota(rows + 1)
    cost, tokens = _tops(mini, places[:-1])
    size: IntArray = places[None, 1:] - places[:-1, None]  # of a tier from position p (row) to q (column)
    size[:, -1] += extra
    may: BoolArray = places[None, 1:] > places[:-1, None]
    if spec.cap is not None:
        may &= (size * tokens[:, None] <= spec.cap) | (size == 1)
    price: FloatArray = np.where(may, size * cost[:, None], np.inf)
    best: FloatArray = np.full(places.size, np.inf)
    best[0] = 0.0
    came_from: list[IntArray] = []
    for columns in range(1, most_columns(mini, spec) + 1):
        through = best[:-1, None] + price
        came_from.append(np.concatenate([[0], through.argmin(axis=0)]))
        best = np.concatenate([[np.inf], through.min(axis=0)])
        if columns >= least and columns % spec.micro_batch_multiple == 0 and np.isfinite(best[-1]):
            cuts = [rows]
            for origin in reversed(came_from):
                cuts.append(int(origin[cuts[-1]]))
            yield cuts[:0:-1]


def _full_cuts(mini: MiniBatch, spec: StepSpec, least: int) -> list[int]:
    """Tiers from the longest rows down, each with as many rows as fit; then halve the widest until there are enough."""
    rows = int(mini.rows.min())
    _, tokens = _tops(mini, iota(rows))
    cuts = [0]
    while spec.cap is not None:
        following = cuts[-1] + max(1, spec.cap // max(1, int(tokens[cuts[-1]])))
        if following >= rows:
            break
        cuts.append(following)
    return halved(cuts, rows, round_up(max(len(cuts), least), spec.micro_batch_multiple))


def _falling(mini: MiniBatch) -> IntArray:
    """Real rows, the longest first."""
    real = np.flatnonzero(~mini.padding)
    return real[np.argsort(-mini.tokens[real], kind="stable")]


def _tops(mini: MiniBatch, places: IntArray) -> tuple[FloatArray, IntArray]:
    """Cost and tokens of the longest row on any rank at or after each position."""
    first = np.minimum(mini.real_rows[None, :], places[:, None]).sum(axis=1)
    falling, pads = _falling(mini), mini.padding
    cost = np.maximum(np.append(mini.cost[falling], 0.0)[first], mini.cost[pads].max(initial=0.0))
    return cost, np.maximum(np.append(mini.tokens[falling], 0)[first], mini.tokens[pads].max(initial=0))


def _tiers(mini: MiniBatch, cuts: list[int]) -> Layout:
    """Tiers that start at these positions; in each, the least loaded rank gets the longest rows."""
    ranks, falling = mini.dp_size, _falling(mini)
    cell = np.empty(mini.cost.size, dtype=np.int64)
    ends = [*cuts[1:], int(mini.rows.max())]
    pads = np.split(np.flatnonzero(mini.padding), np.cumsum(mini.rows - mini.real_rows)[:-1])
    total = np.zeros(ranks)
    at = 0
    for column, (start, end) in enumerate(zip(cuts, ends, strict=True)):
        take = np.clip(mini.real_rows - start, 0, end - start)
        for rank in np.lexsort((total, -take)).tolist():
            rows = falling[at : at + int(take[rank])]
            at += rows.size
            cell[rows] = column * ranks + rank
            if rows.size:
                total[rank] += (min(end, int(mini.rows[rank])) - start) * mini.cost[rows[0]]
    for rank, mine in enumerate(pads):
        place = int(mini.real_rows[rank]) + iota(mine.size)
        cell[mine] = (np.searchsorted(np.array(cuts), place, side="right") - 1) * ranks + rank
    return Layout(mini, len(cuts), cell)


class _Descent:
    """First-improvement descent over all swaps and moves."""

    def __init__(self, layout: Layout, model: MicroBatchCost, spec: StepSpec, max_calls: int) -> None:
        self.mini, self.model, self.spec, self.max_calls = layout.mini, model, spec, max_calls
        self.cell: IntArray = np.array(layout.cell)
        self.rows: list[list[int]] = [np.flatnonzero(self.cell == c).tolist() for c in range(layout.num_cells)]
        self.load: FloatArray = np.array(layout.loads())
        self.calls = 0

    def sweep(self) -> bool:
        """Whether any change was made."""
        mini, ranks, n = self.mini, self.mini.dp_size, self.mini.cost.size
        changed = False
        for a in range(n):
            for b in range(a + 1, n):
                i, j = int(self.cell[a]), int(self.cell[b])
                alike = mini.padding[a] == mini.padding[b] or i % ranks == j % ranks
                if i != j and alike and mini.tokens[a] != mini.tokens[b]:
                    changed |= self._try(i, j, [a], [b])
            for j in range(int(self.cell[a]) % ranks, 0 if mini.fixed_rows else len(self.rows), ranks):
                i = int(self.cell[a])
                if i != j and len(self.rows[i]) > 1:
                    changed |= self._try(i, j, [a], [])
            if self.calls >= self.max_calls:
                break
        return changed

    def _try(self, i: int, j: int, leave: list[int], come: list[int]) -> bool:
        """Swap these rows between cells i and j if that lowers the cost."""
        after_i = [row for row in self.rows[i] if row not in leave] + come
        after_j = [row for row in self.rows[j] if row not in come] + leave
        if not (self._fits(after_i) and self._fits(after_j)):
            return False
        load: FloatArray = np.array(self.load)
        load.flat[[i, j]] = [micro_batch_cost(self.model, self.mini.tokens[rows]) for rows in (after_i, after_j)]
        self.calls += 2
        if not self._value(load) < self._value(self.load) * (1 - 1e-12):
            return False
        self.load, self.rows[i], self.rows[j] = load, after_i, after_j
        self.cell[after_i], self.cell[after_j] = i, j
        return True

    def _fits(self, rows: list[int]) -> bool:
        cap = self.spec.cap
        return cap is None or len(rows) == 1 or len(rows) * int(self.mini.tokens[rows].max()) <= cap

    def _value(self, load: FloatArray) -> float:
        """The objective, with a tiny sum of squares to break ties."""
        cost = load.max(axis=1).sum() if self.spec.objective == "lockstep" else load.sum(axis=0).max()
        return float(cost + 1e-9 * (load**2).sum() / (load.sum() or 1.0))
