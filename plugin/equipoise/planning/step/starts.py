"""Where the search starts: layouts of one mini-batch, each by a rule of its own.

Every layout respects the rows of each rank and leaves no cell empty; the token cap may still be broken.
"""

from __future__ import annotations

import bisect
import itertools

import numpy as np

from equipoise._arrays import FloatArray, IntArray, counts, iota, sums
from equipoise.planning.partition import greedy, karmarkar_karp, partitioners
from equipoise.planning.step.layout import Layout, MiniBatch


def by_tiers(mini: MiniBatch, num_columns: int) -> IntArray:
    """Column after column from the longest rows down, each one levelled by largest differencing."""
    real = np.flatnonzero(~mini.padding)
    falling = real[np.argsort(-mini.cost[real], kind="stable")]
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    at = 0
    for column, limits in enumerate(_quotas_by_tokens(mini, num_columns)):
        rows = falling[at : at + int(limits.sum())]
        at += rows.size
        if rows.size:
            cell[rows] = column * mini.dp_size + _divide(mini.cost[rows], limits, "kk")
    return _with_padding(mini, cell, num_columns)


def by_stripes(mini: MiniBatch, num_columns: int) -> IntArray:
    """All cells alike: every one gets a long, a middle and a short row."""
    real = np.flatnonzero(~mini.padding)
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    quota = _quotas_even(mini.real_rows, num_columns)
    cell[real] = greedy.longest_first(mini.cost[real], quota.size, max_rows=quota.ravel())
    return _with_padding(mini, cell, num_columns)


def by_fold(mini: MiniBatch, num_columns: int) -> IntArray:
    """The roomiest layout: the longest rows alone, the others longest with shortest, padding treated like any row.

    With at most two rows to a cell, as in the most columns that a rank's rows allow, no layout has more room.
    """
    quota = _quotas_even(mini.rows, num_columns).ravel()
    cells = np.argsort(quota, kind="stable")
    tokens = mini.tokens.astype(np.float64)
    return cells[greedy.longest_first(tokens, quota.size, max_rows=quota[cells])]


def rank_by_rule(mini: MiniBatch, algorithm: str) -> IntArray:
    """Rank of each row by ``algorithm`` alone, shape (n,); -1 for padding."""
    real = np.flatnonzero(~mini.padding)
    rank = np.full(mini.cost.size, -1, dtype=np.int64)
    rank[real] = _divide(mini.cost[real], mini.real_rows, algorithm)
    return rank


def by_ranks(mini: MiniBatch, rank: IntArray, num_columns: int, algorithm: str, cap: int | None) -> IntArray | None:
    """Each rank's rows divided into micro-batches, fullest micro-batch first: what trainers do.

    Args:
        mini: the mini-batch.
        rank: as :func:`rank_by_rule` gives it.
        num_columns: micro-batches of each rank.
        algorithm: the rule.
        cap: the most tokens of a micro-batch of more than one row.

    Returns:
        The cell of each row, or None as soon as a micro-batch is above the cap.

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


def tiers_of_ranks(mini: MiniBatch, rank: IntArray, num_columns: int) -> IntArray:
    """Column after column from each rank's longest rows down; ``rank`` as :func:`rank_by_rule` gives it."""
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    quota = _quotas_by_tokens(mini, num_columns)
    for r in range(mini.dp_size):
        rows = np.flatnonzero(rank == r)
        falling = rows[np.argsort(-mini.cost[rows], kind="stable")]
        cell[falling] = np.repeat(iota(num_columns), quota[:, r]) * mini.dp_size + r
    return _with_padding(mini, cell, num_columns)


def fold_of_ranks(mini: MiniBatch, rank: IntArray, num_columns: int) -> IntArray:
    """The roomiest layout that keeps each row on its rank; padding is placed last."""
    cell = np.full(mini.cost.size, -1, dtype=np.int64)
    tokens = mini.tokens.astype(np.float64)
    for r in range(mini.dp_size):
        rows = np.flatnonzero(rank == r)
        quota = np.sort(_quotas_even(np.array([rows.size]), num_columns).ravel())
        cell[rows] = greedy.longest_first(tokens[rows], num_columns, max_rows=quota) * mini.dp_size + r
    return _with_padding(mini, cell, num_columns)


def as_it_came(mini: MiniBatch, least_columns: int, cap: int | None, *, padded: bool = False) -> Layout:
    """Contiguous ranks, and micro-batches filled in order.

    Where ranks have unequal rows, a rank may be left with fewer micro-batches than another.

    Args:
        mini: the mini-batch.
        least_columns: at least so many micro-batches.
        cap: the most tokens of a micro-batch; a longer row stands alone.
        padded: tokens of a micro-batch are its rows × its longest row.

    """
    ranks = mini.dp_size
    fill = _next_fit_padded if padded else _next_fit
    ends = np.cumsum(mini.rows).tolist()
    cuts: list[list[int]] = []
    for start, end in itertools.pairwise([0, *ends]):
        if mini.fixed_rows is not None:
            cuts.append(list(range(start, end, mini.fixed_rows)))
        elif cap is None:
            cuts.append([start])
        else:
            cuts.append(fill(mini.tokens, start, end, cap))
    columns = max(least_columns, *map(len, cuts))
    cell = np.empty(mini.cost.size, dtype=np.int64)
    for r, end in enumerate(ends):
        for column, (a, b) in enumerate(itertools.pairwise([*_split_to(cuts[r], end, columns), end])):
            cell[a:b] = column * ranks + r
    return Layout(mini, columns, cell)


def _next_fit(tokens: IntArray, start: int, end: int, cap: int) -> list[int]:
    """Starts of runs that hold at most ``cap`` tokens (a longer row stands alone)."""
    running = [0, *itertools.accumulate(tokens[start:end].tolist())]
    at = [0]
    while True:
        following = max(bisect.bisect_right(running, running[at[-1]] + cap) - 1, at[-1] + 1)
        if following >= end - start:
            return [start + place for place in at]
        at.append(following)


def _next_fit_padded(tokens: IntArray, start: int, end: int, cap: int) -> list[int]:
    """Starts of runs whose rows, padded to the longest, hold at most ``cap`` tokens (a longer row stands alone)."""
    at, longest = [start], 0
    for row in range(start, end):
        grown = max(longest, int(tokens[row]))
        if row > at[-1] and (row - at[-1] + 1) * grown > cap:
            at.append(row)
            grown = int(tokens[row])
        longest = grown
    return at


def _split_to(starts: list[int], end: int, count: int) -> list[int]:
    """Halve the run with the most rows until there are ``count`` runs (or every run is one row)."""
    starts = list(starts)
    while len(starts) < count:
        sizes = [b - a for a, b in itertools.pairwise([*starts, end])]
        widest = max(range(len(sizes)), key=lambda i: sizes[i])
        if sizes[widest] < 2:
            return starts
        starts.insert(widest + 1, starts[widest] + sizes[widest] // 2)
    return starts


def _quotas_by_tokens(mini: MiniBatch, num_columns: int) -> IntArray:
    """Real rows of each cell, shape (num_columns, dp_size): falling rows, cut where a column has its share of tokens.

    Long rows thus stand with long ones, few to a cell, and each column is easy to level. Fixed micro-batches are filled
    in turn, so that padding comes into the last ones, which hold the shortest rows.
    """
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
    """Rows of each cell, as even as can be, shape (num_columns, dp_size); the last columns get one more.

    A greedy rule gives the first cells the longest rows, and these should have fewer.
    """
    column = iota(num_columns)[:, None]
    return rows // num_columns + (column >= num_columns - rows % num_columns)


def _divide(cost: FloatArray, limits: IntArray, algorithm: str) -> IntArray:
    """Parts with just ``limits`` rows: by differencing where all are equal, else greedily."""
    if algorithm == "kk" and (limits == limits[0]).all():
        return karmarkar_karp.equal_size(cost, limits.size)
    return greedy.longest_first(cost, limits.size, max_rows=limits)


def _with_padding(mini: MiniBatch, cell: IntArray, num_columns: int) -> IntArray:
    """Place each rank's padding where it has the fewest rows; then give cells that are still empty a row of its own."""
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
