"""Lower bounds: what no plan of the same rows can beat.

``mini_batch_bound`` is the largest of several, each with its reason:

* *mean*: a rank's loads add up to at least the mean over ranks.
* *longest row*: some micro-batch holds it.
* *equal counts*: the rank that holds the longest row holds ``rows per rank - 1`` others, at best the cheapest.
* *columns under the cap*: sort columns (micro-batches of all ranks) by level, the highest first. A column has R
  cells. Rows of more than cap / (c + 1) tokens stand at most c to a cell, so that the first K - 1 columns hold at
  most (K - 1) · c · R of them, and column K is no lower than the next one of those rows. And whatever is in the first
  K columns fits in K · R caps, so that its cost is at most F(K · R · cap), the cost of the densest rows (cost per
  token) of that many tokens, the last one in part; the rest of the cost is left to the other columns. Hence for every
  K: Σ levels ≥ Σ over the first K of those rows' costs + (total - F(K · R · cap)) / R.
"""

from __future__ import annotations

import numpy as np

from equipoise._arrays import FloatArray, IntArray

_SHARES = (1, 2, 3, 4)


def mini_batch_bound(
    cost: FloatArray, tokens: IntArray, *, num_ranks: int, cap: int | None = None, rows_per_rank: int | None = None
) -> float:
    """Lockstep cost that no layout of these rows is below; the last two reasons hold for the rank cost as well.

    Args:
        cost: cost of each row, shape (n,).
        tokens: tokens of each row, shape (n,).
        num_ranks: ranks that meet at each micro-batch.
        cap: the most tokens of a micro-batch (lone rows may exceed it); None for no cap.
        rows_per_rank: rows of the rank with the fewest; None where counts are free.

    >>> mini_batch_bound(np.array([9.0, 1.0, 1.0, 1.0]), np.array([9, 1, 1, 1]), num_ranks=2, rows_per_rank=2)
    10.0
    """
    total = float(cost.sum())
    falling = np.sort(cost)[::-1]
    best = max(total / num_ranks, float(falling[0]))
    if rows_per_rank is not None and rows_per_rank > 1:
        best = max(best, float(falling[0]) + float(falling[-(rows_per_rank - 1) :].sum()))
    if cap is not None:
        best = max(best, _columns_bound(cost, tokens, num_ranks, cap))
    return best


def _columns_bound(cost: FloatArray, tokens: IntArray, num_ranks: int, cap: int) -> float:
    if (tokens > cap).any():
        return 0.0  # lone rows above the cap void the argument about tokens
    total = float(cost.sum())
    columns = min(cost.size // num_ranks, int(tokens.sum()) // (num_ranks * cap) + 2)
    wide = [np.sort(cost[tokens * (c + 1) > cap])[::-1] for c in _SHARES]
    density = cost / np.maximum(tokens, 1)
    order = np.argsort(-density, kind="stable")
    upto_tokens = np.concatenate([[0], np.cumsum(tokens[order])])
    upto_cost = np.concatenate([[0.0], np.cumsum(cost[order])])
    best = levels = 0.0
    for k in range(1, columns + 1):
        places = [(k - 1) * c * num_ranks for c in _SHARES]
        firsts = [float(rows[at]) for at, rows in zip(places, wide, strict=True) if rows.size > at]
        levels += max(firsts, default=0.0) if k > 1 else float(cost.max())
        held = float(np.interp(k * num_ranks * cap, upto_tokens, upto_cost))
        best = max(best, levels + max(0.0, total - held) / num_ranks)
    return best
