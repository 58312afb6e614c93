"""Layouts for engines that pad each micro-batch to its longest row: rows of like length together.

A tier is one column: the next longest rows, as many to each rank. Its cost is its rows per rank times the cost of its
longest row, so that the cuts between tiers alone decide what the tiers cost, and the best cuts for a number of columns
come out of a recursion over positions. Ranks with shorter rows could take more of them at once; on small mini-batches a
search over swaps and moves finds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, iota
from equipoise.errors import InfeasiblePlan, must
from equipoise.planning.partition.pack import round_up
from equipoise.planning.step import starts
from equipoise.planning.step.layout import Layout, MiniBatch
from equipoise.planning.step.limits import fewest_columns, most_columns
from equipoise.planning.step.spec import StepSpec
from equipoise.planning.workload.padded import MicroBatchCost, micro_batch_cost

_MAX_POSITIONS = 1024  # rows of a rank up to which all cuts are looked at; beyond, tiers are filled from the top
_SMALL_ROWS = 64
_MAX_CALLS = 12_000  # of the cost model by the search of all mini-batches together


@dataclass(frozen=True)
class PaddedLayout(Layout):
    """A layout whose micro-batches are padded to their longest row."""

    model: MicroBatchCost

    @cached_property
    def _loads(self) -> FloatArray:
        order = np.argsort(self.cell, kind="stable")
        cells = np.split(self.mini.tokens[order], np.cumsum(counts(self.cell, self.num_cells))[:-1])
        loads = [micro_batch_cost(self.model, tokens) if tokens.size else 0.0 for tokens in cells]
        return np.array(loads).reshape(self.num_columns, self.mini.dp_size)

    def loads(self) -> FloatArray:
        """Cost of each cell, padding of its rows included, shape (num_columns, dp_size)."""
        return self._loads

    def crowded_tokens(self) -> int:
        """Padded tokens of the fullest cell that holds more than one row; 0 if none does."""
        longest = np.zeros(self.num_cells, dtype=np.int64)
        np.maximum.at(longest, self.cell, self.mini.tokens)
        rows = counts(self.cell, self.num_cells)
        return int(np.where(rows > 1, rows * longest, 0).max())


def search_padded(minis: list[MiniBatch], spec: StepSpec, model: MicroBatchCost) -> list[Layout]:
    """The best layout found for each mini-batch, by what it costs padded.

    Without an overhead it is one in the fewest micro-batches (with it, in the number that pays): the more there are,
    the less padding, down to one row in each.

    Raises:
        InfeasiblePlan: the rows of one do not fit under the cap in as many micro-batches as there may be.

    """
    return [_best(mini, spec, model, _MAX_CALLS // len(minis)) for mini in minis]


def _best(mini: MiniBatch, spec: StepSpec, model: MicroBatchCost, max_calls: int) -> Layout:
    found: list[PaddedLayout] = []
    rules = ("kk", "lpt") if spec.algorithm == "refined" else (spec.algorithm,)
    tiers = _by_tiers(mini, spec, model)
    if spec.algorithm == "refined" and tiers is not None:
        found += [tiers, _descend(tiers, spec, max_calls)]
    for rule in rules:
        by_rule = _by_rule(mini, spec, model, rule)
        found += [] if by_rule is None else [by_rule]
    if not found and tiers is not None:
        found.append(tiers)
    came = starts.as_it_came(mini, spec.min_micro_batches, spec.cap, padded=True)
    if came.num_columns % spec.micro_batch_multiple == 0:
        layout = PaddedLayout(mini, came.num_columns, came.cell, model)
        found += [layout] if layout.legal(spec.cap) else []
    if not found:
        raise InfeasiblePlan(
            must(
                "max_token_len_per_gpu",
                f"hold a rank's {int(mini.rows.max())} rows of a mini-batch, padded to the longest of a micro-batch, "
                f"in a multiple of micro_batch_multiple = {spec.micro_batch_multiple} micro-batches",
                spec.max_token_len_per_gpu,
                "raise it or lower micro_batch_multiple"
                + ("" if spec.equal_count else " or pad so that ranks have equal rows"),
            )
        )
    return min(found, key=lambda layout: (layout.value(spec), layout.lockstep()))


def _by_rule(mini: MiniBatch, spec: StepSpec, model: MicroBatchCost, rule: str) -> PaddedLayout | None:
    """What a plain rule returns, in few micro-batches in which it fits (their number grows by an eighth at a time)."""
    rank = starts.rank_by_rule(mini, rule)
    columns, most = fewest_columns(mini, spec), most_columns(mini, spec)
    while columns <= most:
        cell = starts.by_ranks(mini, rank, columns, rule, spec.cap)
        if cell is not None:
            layout = PaddedLayout(mini, columns, cell, model)
            if layout.legal(spec.cap):
                return layout
        grown = round_up(columns + max(1, columns // 8), spec.micro_batch_multiple)
        columns = grown if columns == most else min(grown, most)
    return None


# -- tiers ------------------------------------------------------------------------------------------------------------


def _by_tiers(mini: MiniBatch, spec: StepSpec, model: MicroBatchCost) -> PaddedLayout | None:
    """The best tiers: in the fewest columns, or in more of them while each saves more than the overhead."""
    if mini.fixed_rows is not None:
        return _tiers(mini, list(range(0, int(mini.rows[0]), mini.fixed_rows)), model)
    if mini.rows.min() > _MAX_POSITIONS:
        layout = _tiers(mini, _full_cuts(mini, spec, fewest_columns(mini, spec)), model)
        return layout if layout.legal(spec.cap) and layout.num_columns % spec.micro_batch_multiple == 0 else None
    best: PaddedLayout | None = None
    for cuts in _best_cuts(mini, spec, fewest_columns(mini, spec)):
        layout = _tiers(mini, cuts, model)
        if not layout.legal(spec.cap):
            continue
        if best is not None and layout.value(spec) >= best.value(spec):
            break
        best = layout
        if spec.micro_batch_overhead == 0:
            break
    return best


def _best_cuts(mini: MiniBatch, spec: StepSpec, least: int) -> Iterator[list[int]]:
    """For each number of columns that may be, from ``least`` on, where the cheapest tiers begin on every rank.

    best[c, q] is the least cost of the first q positions in c tiers: min over p of best[c - 1, p] + (q - p) · cost(p).
    """
    rows = int(mini.rows.min())
    extra = int(mini.rows.max()) - rows
    places = iota(rows + 1)
    cost, tokens = _tops(mini, places[:-1])
    size: IntArray = places[None, 1:] - places[:-1, None]  # of a tier from place p (row) to place q (column)
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
    """Tiers from the longest rows down, each with as many rows as fit; then the widest are halved until enough."""
    rows = int(mini.rows.min())
    _, tokens = _tops(mini, iota(rows))
    cuts = [0]
    while spec.cap is not None:
        following = cuts[-1] + max(1, spec.cap // max(1, int(tokens[cuts[-1]])))
        if following >= rows:
            break
        cuts.append(following)
    want = round_up(max(len(cuts), least), spec.micro_batch_multiple)
    while len(cuts) < min(want, rows):
        size = np.diff([*cuts, rows])
        widest = int(size.argmax())
        cuts.insert(widest + 1, cuts[widest] + int(size[widest]) // 2)
    return cuts


def _falling(mini: MiniBatch) -> IntArray:
    """Real rows, the longest first."""
    real = np.flatnonzero(~mini.padding)
    return real[np.argsort(-mini.tokens[real], kind="stable")]


def _tops(mini: MiniBatch, places: IntArray) -> tuple[FloatArray, IntArray]:
    """Cost and tokens of the longest row at or after each position of the ranks."""
    first = np.minimum(mini.real_rows[None, :], places[:, None]).sum(axis=1)
    falling, pads = _falling(mini), np.flatnonzero(mini.padding)
    least_cost = float(mini.cost[pads].max()) if pads.size else 0.0
    least_tokens = int(mini.tokens[pads].max()) if pads.size else 0
    cost = np.maximum(np.append(mini.cost[falling], 0.0)[first], least_cost)
    return cost, np.maximum(np.append(mini.tokens[falling], 0)[first], least_tokens)


def _tiers(mini: MiniBatch, cuts: list[int], model: MicroBatchCost) -> PaddedLayout:
    """Tiers that begin at these positions; in each one the rank with the least so far gets the longest rows."""
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
    return PaddedLayout(mini, len(cuts), cell, model)


# -- search -----------------------------------------------------------------------------------------------------------


def _descend(layout: PaddedLayout, spec: StepSpec, max_calls: int) -> PaddedLayout:
    """The layout after swaps of two rows, and moves of one within its rank, that lower the cost; small ones only."""
    mini = layout.mini
    if mini.cost.size > _SMALL_ROWS or mini.dp_size == 1:
        return layout
    search = _Descent(layout, spec, max_calls)
    while search.calls < max_calls and search.sweep():
        pass
    better = PaddedLayout(mini, layout.num_columns, search.cell, layout.model)
    return better if better.legal(spec.cap) else layout


class _Descent:
    """First improvements over all pairs of rows, then over all moves, with the rows of each cell kept."""

    def __init__(self, layout: PaddedLayout, spec: StepSpec, max_calls: int) -> None:
        self.mini, self.model, self.spec, self.max_calls = layout.mini, layout.model, spec, max_calls
        self.cell: IntArray = np.array(layout.cell)
        self.rows: list[list[int]] = [np.flatnonzero(self.cell == c).tolist() for c in range(layout.num_cells)]
        self.load: FloatArray = np.array(layout.loads())
        self.calls = 0

    def sweep(self) -> bool:
        """Whether any change was made."""
        mini, ranks = self.mini, self.mini.dp_size
        changed = False
        n, cells = mini.cost.size, len(self.rows)
        fixed = mini.fixed_rows is not None
        for a in range(n):
            for b in range(a + 1, n):
                i, j = int(self.cell[a]), int(self.cell[b])
                alike = mini.padding[a] == mini.padding[b] or i % ranks == j % ranks
                if i != j and alike and mini.tokens[a] != mini.tokens[b]:
                    changed |= self._try(i, j, [a], [b])
            for column in range(0 if fixed else cells // ranks):
                i = int(self.cell[a])
                j = column * ranks + i % ranks
                if i != j and len(self.rows[i]) > 1:
                    changed |= self._try(i, j, [a], [])
            if self.calls >= self.max_calls:
                break
        return changed

    def _try(self, i: int, j: int, leave: list[int], come: list[int]) -> bool:
        """Exchange these rows between cells i and j if that costs less."""
        after_i = [row for row in self.rows[i] if row not in leave] + come
        after_j = [row for row in self.rows[j] if row not in come] + leave
        if not (self._fits(after_i) and self._fits(after_j)):
            return False
        ranks = self.mini.dp_size
        load: FloatArray = np.array(self.load)
        for cell, rows in ((i, after_i), (j, after_j)):
            load[cell // ranks, cell % ranks] = micro_batch_cost(self.model, self.mini.tokens[rows])
            self.calls += 1
        if not self._value(load) < self._value(self.load) * (1 - 1e-12):
            return False
        self.load, self.rows[i], self.rows[j] = load, after_i, after_j
        self.cell[after_i], self.cell[after_j] = i, j
        return True

    def _fits(self, rows: list[int]) -> bool:
        cap = self.spec.cap
        return cap is None or len(rows) == 1 or len(rows) * int(self.mini.tokens[rows].max()) <= cap

    def _value(self, load: FloatArray) -> float:
        """The objective; the sum of squares breaks ties, far below any difference in cost."""
        cost = load.max(axis=1).sum() if self.spec.objective == "lockstep" else load.sum(axis=0).max()
        return float(cost + 1e-9 * (load**2).sum() / (load.sum() or 1.0))
