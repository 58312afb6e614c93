"""Where the search starts: complete layouts of one mini-batch, each by a rule of its own.

A layout gives the cell of each row, shape (n,), on a grid of ``num_columns`` micro-batches × ``dp_size`` ranks (cell =
column · dp_size + rank). Every layout respects the rows of each rank; the token cap may still be broken.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, iota, sums
from equipoise.partition import greedy, karmarkar_karp, partitioners


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """One mini-batch as the planner sees it; arrays are in the order in which its rows came.

    Attributes:
        cost: shape (n,).
        tokens: shape (n,).
        padding: shape (n,).
        rows: rows of each rank, shape (dp_size,).
        real_rows: rows of each rank that are no padding, shape (dp_size,).
        fixed_rows: rows of every micro-batch, or None where the token cap decides.

    """

    cost: FloatArray
    tokens: IntArray
    padding: BoolArray
    rows: IntArray
    real_rows: IntArray
    fixed_rows: int | None

    @property
    def dp_size(self) -> int:
        """Number of ranks."""
        return self.rows.size


def quotas_by_tokens(mini: MiniBatch, num_columns: int) -> IntArray:
    """Real rows of each cell, shape (num_columns, dp_size): falling rows, cut where a column has its share of tokens.

    Long rows thus stand with long ones, few to a cell, and each column is easy to level.
    """
    ranks = mini.dp_size
    if mini.fixed_rows is not None:
        return _spread_padding_quota(mini, num_columns)
    fewest = int(mini.real_rows.min())
    columns = min(num_columns, max(fewest, 1))
    falling = np.sort(mini.tokens[~mini.padding])[::-1]
    cumulative = _running_total(falling)
    quota = np.zeros((num_columns, ranks), dtype=np.int64)
    done = 0
    for column in range(columns - 1):
        share = cumulative[-1] * (column + 1) / columns
        place = bisect.bisect_left(cumulative, share)
        take = round(place / ranks) - done
        take = max(1, min(take, fewest - done - (columns - 1 - column)))
        quota[column] = take
        done += take
    quota[columns - 1] = mini.real_rows - done
    return quota


def quotas_even(mini: MiniBatch, num_columns: int) -> IntArray:
    """Real rows of each cell, as even as can be, shape (num_columns, dp_size)."""
    if mini.fixed_rows is not None:
        return _spread_padding_quota(mini, num_columns)
    column = np.arange(num_columns)[:, None]
    return mini.real_rows // num_columns + (column < mini.real_rows % num_columns)


def _spread_padding_quota(mini: MiniBatch, num_columns: int) -> IntArray:
    """Fixed micro-batches: padding fills the last ones, which hold the shortest rows."""
    filled = np.cumsum(np.full((num_columns, mini.dp_size), mini.fixed_rows), axis=0)
    upto = np.minimum(filled, mini.real_rows)
    return np.diff(upto, axis=0, prepend=0)


def by_tiers(mini: MiniBatch, num_columns: int) -> IntArray:
    """Column after column from the longest rows down, each one levelled by largest differencing."""
    return _fill_columns(mini, quotas_by_tokens(mini, num_columns))


def by_stripes(mini: MiniBatch, num_columns: int) -> IntArray:
    """All cells alike: every one gets a long, a middle and a short row."""
    if num_columns == 1 or mini.fixed_rows is not None:
        return _fill_columns(mini, quotas_even(mini, num_columns))
    quota = quotas_even(mini, num_columns)
    real = np.flatnonzero(~mini.padding)
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    cell[real] = greedy.longest_first(mini.cost[real], quota.size, max_rows=quota.ravel())
    return _with_padding(mini, cell, num_columns)


def by_ranks(mini: MiniBatch, num_columns: int, algorithm: str) -> IntArray:
    """Ranks first, then each rank's rows into micro-batches, fullest micro-batch first: what trainers do."""
    real = np.flatnonzero(~mini.padding)
    rank = np.full(mini.cost.size, -1, dtype=np.int64)
    rank[real] = _divide(mini.cost[real], mini.real_rows, algorithm)
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    for r in range(mini.dp_size):
        rows = np.flatnonzero(rank == r)
        if not rows.size:
            continue
        if mini.fixed_rows is not None:
            falling = rows[np.argsort(-mini.cost[rows], kind="stable")]
            column = np.empty(rows.size, dtype=np.int64)
            column[np.argsort(np.argsort(-mini.cost[rows], kind="stable"))] = 0
            cell[falling] = (np.arange(rows.size) // mini.fixed_rows) * mini.dp_size + r
            continue
        k = min(num_columns, rows.size)
        part = partitioners[algorithm](mini.cost[rows], k, equal_size=False)
        load = sums(part, mini.cost[rows], k)
        place = np.empty(k, dtype=np.int64)
        place[np.argsort(-load, kind="stable")] = np.arange(k)
        cell[rows] = place[part] * mini.dp_size + r
    return _with_padding(mini, cell, num_columns)


def as_it_came(mini: MiniBatch, num_columns: int | None, cap: int | None) -> tuple[IntArray, int]:
    """Contiguous ranks, and micro-batches filled in order; the cell of each row and the number of columns.

    Args:
        mini: the mini-batch.
        num_columns: at least so many micro-batches; None for as many as filling in order takes.
        cap: the most tokens of a micro-batch.

    """
    ranks = mini.dp_size
    ends = np.cumsum(mini.rows)
    cuts: list[list[int]] = []
    for r in range(ranks):
        start, end = int(ends[r] - mini.rows[r]), int(ends[r])
        if mini.fixed_rows is not None:
            cuts.append(list(range(start, end, mini.fixed_rows)))
        elif cap is None:
            cuts.append([start])
        else:
            cuts.append(_next_fit(mini.tokens, start, end, cap))
    columns = max(len(c) for c in cuts)
    columns = max(columns, num_columns or 1)
    cell = np.empty(mini.cost.size, dtype=np.int64)
    for r in range(ranks):
        end = int(ends[r])
        starts = _split_to(cuts[r], end, columns)
        bounds = [*starts, end]
        for column, (a, b) in enumerate(itertools.pairwise(bounds)):
            cell[a:b] = column * ranks + r
    return cell, columns


def _running_total(tokens: IntArray) -> list[int]:
    """Tokens before each row and, last, of all rows: n + 1 numbers."""
    return [0, *itertools.accumulate(tokens.tolist())]


def _next_fit(tokens: IntArray, start: int, end: int, cap: int) -> list[int]:
    """Starts of runs that hold at most ``cap`` tokens (a longer row stands alone)."""
    cumulative = _running_total(tokens[start:end])
    starts = [0]
    while True:
        at = starts[-1]
        following = bisect.bisect_right(cumulative, cumulative[at] + cap) - 1
        following = max(following, at + 1)
        if following >= end - start:
            return [start + s for s in starts]
        starts.append(following)


def _split_to(starts: list[int], end: int, count: int) -> list[int]:
    """Halve the run with the most rows until there are ``count`` runs (or every run is one row)."""
    starts = list(starts)
    while len(starts) < count:
        bounds = [*starts, end]
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        widest = max(range(len(sizes)), key=lambda i: sizes[i])
        if sizes[widest] < 2:
            return starts
        starts.insert(widest + 1, starts[widest] + sizes[widest] // 2)
    return starts


def _fill_columns(mini: MiniBatch, quota: IntArray) -> IntArray:
    real = np.flatnonzero(~mini.padding)
    falling = real[np.argsort(-mini.cost[real], kind="stable")]
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    at = 0
    for column, limits in enumerate(quota):
        rows = falling[at : at + int(limits.sum())]
        at += rows.size
        if rows.size:
            cell[rows] = column * mini.dp_size + _divide(mini.cost[rows], limits, "kk")
    return _with_padding(mini, cell, len(quota))


def _divide(cost: FloatArray, limits: IntArray, algorithm: str) -> IntArray:
    """Parts with just ``limits`` rows: by differencing where all are equal, else greedily."""
    if algorithm == "kk" and (limits == limits[0]).all():
        return karmarkar_karp.equal_size(cost, limits.size)
    return greedy.longest_first(cost, limits.size, max_rows=limits)


def _with_padding(mini: MiniBatch, cell: IntArray, num_columns: int) -> IntArray:
    """Place each rank's padding rows, first where a cell would be empty; then mend cells that still are."""
    ranks = mini.dp_size
    cells = ranks * num_columns
    count = counts(cell[cell >= 0], cells)
    padding = np.flatnonzero(mini.padding)
    at = 0
    for r in range(ranks):
        mine = iota(num_columns) * ranks + r
        for row in padding[at : at + int(mini.rows[r] - mini.real_rows[r])]:
            if mini.fixed_rows is None:
                to = int(mine[count[mine].argmin()])
            else:
                to = int(mine[np.argmax(count[mine] < mini.fixed_rows)])
            cell[row] = to
            count[to] += 1
        at += int(mini.rows[r] - mini.real_rows[r])
    for empty in np.flatnonzero(count == 0).tolist():
        mine = iota(num_columns) * ranks + empty % ranks
        donor = int(mine[count[mine].argmax()])
        rows = np.flatnonzero(cell == donor)
        row = rows[int(mini.cost[rows].argmin())]
        cell[row] = empty
        count[donor] -= 1
        count[empty] = 1
    return cell
