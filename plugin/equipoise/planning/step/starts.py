"""Where the search starts: layouts of one mini-batch by simple rules.

Every layout respects the rows of each rank and leaves no cell empty, but may exceed the token cap.
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, iota, sums
from equipoise.planning.partition import greedy, karmarkar_karp, partitioners
from equipoise.planning.step.layout import Layout, MiniBatch

_FEW_ROWS = 3  # per cell


def start(board: MiniBatch, num_columns: int, home: IntArray | None) -> IntArray:
    """Where the search starts: tiers if cells have few rows, else stripes; ``home`` is as for :func:`by_stripes`."""
    few = board.fixed_rows is None and num_columns > 1 and board.cost.size < _FEW_ROWS * num_columns * board.dp_size
    return (by_tiers if few else by_stripes)(board, num_columns, home)


def by_tiers(mini: MiniBatch, num_columns: int, home: IntArray | None = None) -> IntArray:
    """Columns of similar rows, the longest first, each balanced by largest differencing if rows may change ranks."""
    quota = _quotas_by_tokens(mini, num_columns)
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    if home is None:
        upto = np.cumsum(quota.sum(axis=1))[:-1]
        for column, rows in enumerate(np.split(_falling(mini.cost, ~mini.padding), upto)):
            if rows.size:
                cell[rows] = column * mini.dp_size + _divide(mini.cost[rows], quota[column], "kk")
    else:
        for rank in range(mini.dp_size):
            columns = np.repeat(iota(num_columns), quota[:, rank])
            cell[_falling(mini.cost, home == rank)] = columns * mini.dp_size + rank
    return _with_padding(mini, cell, num_columns)


def by_stripes(mini: MiniBatch, num_columns: int, home: IntArray | None = None) -> IntArray:
    """Cells that are alike: each gets long and short rows. ``home`` is the rank of each row, -1 for padding."""
    quota = _quotas_even(mini.real_rows, num_columns)
    if home is not None:
        return _with_padding(mini, _dealt_at_home(mini.cost, quota, home), num_columns)
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    cell[~mini.padding] = greedy.longest_first(mini.cost[~mini.padding], quota.size, max_rows=quota.ravel())
    return _with_padding(mini, cell, num_columns)


def by_fold(mini: MiniBatch, num_columns: int, home: IntArray | None = None) -> IntArray:
    """The roomiest layout: the longest rows alone, the others paired longest with shortest, padding like any row.

    With at most two rows per cell, no layout has more room. If rows have a home, padding is placed last.
    """
    tokens = mini.tokens.astype(np.float64)
    if home is not None:
        return _with_padding(mini, _dealt_at_home(tokens, _quotas_even(mini.real_rows, num_columns), home), num_columns)
    quota = _quotas_even(mini.rows, num_columns).ravel()
    cells = np.argsort(quota, kind="stable")
    return cells[greedy.longest_first(tokens, quota.size, max_rows=quota[cells])]


def _dealt_at_home(weights: FloatArray, quota: IntArray, home: IntArray) -> IntArray:
    """Cell of each row on its home rank, assigned greedily; -1 for padding."""
    cell = np.full(weights.size, -1, dtype=np.int64)
    columns, ranks = quota.shape
    for rank in range(ranks):
        rows = np.flatnonzero(home == rank)
        cell[rows] = greedy.longest_first(weights[rows], columns, max_rows=quota[:, rank]) * ranks + rank
    return cell


def _falling(weights: FloatArray, among: BoolArray) -> IntArray:
    """Indices of these rows, the heaviest first."""
    rows = np.flatnonzero(among)
    return rows[np.argsort(-weights[rows], kind="stable")]


def rank_by_rule(mini: MiniBatch, algorithm: str) -> IntArray:
    """Rank of each row by ``algorithm`` alone, shape (n,); -1 for padding."""
    real = np.flatnonzero(~mini.padding)
    rank = np.full(mini.cost.size, -1, dtype=np.int64)
    rank[real] = _divide(mini.cost[real], mini.real_rows, algorithm)
    return rank


def by_ranks(mini: MiniBatch, rank: IntArray, num_columns: int, algorithm: str, cap: int | None) -> IntArray | None:
    """Divide each rank's rows into micro-batches, the fullest one first, as trainers do.

    Returns:
        The cell of each row, or None if a micro-batch of more than one row is above the cap.
    """
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    tokens = mini.tokens.astype(np.float64)
    real = rank >= 0
    fullest_first = np.argsort(-sums(rank[real], tokens[real], mini.dp_size), kind="stable")
    for r in fullest_first.tolist():
        rows = np.flatnonzero(rank == r)
        if not rows.size:
            continue
        if mini.fixed_rows is not None:
            falling = rows[np.argsort(-mini.cost[rows], kind="stable")]
            cell[falling] = iota(rows.size) // mini.fixed_rows * mini.dp_size + r
            continue
        k = min(num_columns, rows.size)
        part = partitioners[algorithm](mini.cost[rows], k, equal_size=False)
        if cap is not None and ((sums(part, tokens[rows], k) > cap) & (counts(part, k) > 1)).any():
            return None
        place = np.empty(k, dtype=np.int64)
        place[np.argsort(-sums(part, mini.cost[rows], k), kind="stable")] = iota(k)
        cell[rows] = place[part] * mini.dp_size + r
    return _with_padding(mini, cell, num_columns)


def as_it_came(mini: MiniBatch, least_columns: int, cap: int | None) -> Layout:
    """Contiguous ranks, and micro-batches filled in order.

    A row above the cap is alone. If ranks have unequal rows, some may have fewer micro-batches than others.
    """
    ranks = mini.dp_size
    ends = np.cumsum(mini.rows).tolist()
    cuts: list[list[int]] = []
    for start, end in itertools.pairwise([0, *ends]):
        if cap is None:
            cuts.append(list(range(start, end, mini.fixed_rows or end)))
        else:
            cuts.append(_next_fit(mini.tokens, start, end, cap, padded=mini.padded is not None))
    columns = max(least_columns, *map(len, cuts))
    cell = np.empty(mini.cost.size, dtype=np.int64)
    for r, end in enumerate(ends):
        for column, (a, b) in enumerate(itertools.pairwise([*halved(cuts[r], end, columns), end])):
            cell[a:b] = column * ranks + r
    return Layout(mini, columns, cell)


def _next_fit(tokens: IntArray, start: int, end: int, cap: int, *, padded: bool) -> list[int]:
    """Starts of runs of at most ``cap`` tokens, padding included if ``padded``; a longer row is alone."""
    at, held = [start], 0  # their sum, or the longest
    for row, length in enumerate(tokens[start:end].tolist(), start):
        grown = max(held, length) if padded else held + length
        if row > at[-1] and (grown * (row - at[-1] + 1) if padded else grown) > cap:
            at.append(row)
            grown = length
        held = grown
    return at


def halved(starts: list[int], end: int, count: int) -> list[int]:
    """Starts of ``count`` runs, or fewer of one row each: halve the run with the most rows until there are enough."""
    starts = list(starts)
    while len(starts) < min(count, end - starts[0]):
        size = np.diff([*starts, end])
        widest = int(size.argmax())
        starts.insert(widest + 1, starts[widest] + int(size[widest]) // 2)
    return starts


def _quotas_by_tokens(mini: MiniBatch, num_columns: int) -> IntArray:
    """Real rows of each cell, shape (num_columns, dp_size): the longest first, each column with its share of tokens."""
    if mini.fixed_rows is not None:
        filled = (iota(num_columns)[:, None] + 1) * mini.fixed_rows
        return np.diff(np.minimum(filled, mini.real_rows), axis=0, prepend=0)
    fewest = int(mini.real_rows.min())
    columns = min(num_columns, max(fewest, 1))
    falling = np.sort(mini.tokens[~mini.padding])[::-1]
    running = [0, *itertools.accumulate(falling.tolist())]
    quota = np.zeros((num_columns, mini.dp_size), dtype=np.int64)
    done = 0
    for column in range(columns - 1):
        place = bisect.bisect_left(running, running[-1] * (column + 1) / columns)
        take = round(place / mini.dp_size) - done
        take = max(1, min(take, fewest - done - (columns - 1 - column)))
        quota[column] = take
        done += take
    quota[columns - 1] = mini.real_rows - done
    return quota


def _quotas_even(rows: IntArray, num_columns: int) -> IntArray:
    """Rows of each cell, as even as possible, shape (num_columns, dp_size); the last columns get one more.

    A greedy rule gives the longest rows to the first cells, which should have fewer.
    """
    column = iota(num_columns)[:, None]
    return rows // num_columns + (column >= num_columns - rows % num_columns)


def _divide(cost: FloatArray, limits: IntArray, algorithm: str) -> IntArray:
    """Parts with exactly ``limits`` rows: by differencing if all are equal, else greedily."""
    if algorithm == "kk" and (limits == limits[0]).all():
        return karmarkar_karp.equal_size(cost, limits.size)
    return greedy.longest_first(cost, limits.size, max_rows=limits)


def _with_padding(mini: MiniBatch, cell: IntArray, num_columns: int) -> IntArray:
    """Place each rank's padding in its cells with the fewest rows, then move a row into each cell left empty."""
    ranks = mini.dp_size
    count = counts(cell[cell >= 0], ranks * num_columns)
    by_rank = np.repeat(iota(ranks), mini.rows - mini.real_rows)
    for row, rank in zip(np.flatnonzero(mini.padding).tolist(), by_rank.tolist(), strict=True):
        mine = count[rank::ranks]
        column = int(mine.argmin())
        cell[row] = column * ranks + rank
        mine[column] += 1
    for empty in np.flatnonzero(count == 0).tolist():
        mine = count[empty % ranks :: ranks]
        donor = int(mine.argmax()) * ranks + empty % ranks
        rows = np.flatnonzero(cell == donor)
        cell[rows[int(mini.cost[rows].argmin())]] = empty
        count[donor] -= 1
        count[empty] = 1
    return cell
