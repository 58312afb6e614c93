"""Lower bounds on the cost of any plan of the same rows.

``mini_batch_bound`` is the largest of four:

* *mean*: some rank has at least the mean load.
* *longest row*: some micro-batch holds it.
* *equal counts*: the rank with the longest row also has ``rows per rank - 1`` others, at best the cheapest ones.
* *columns under the cap*: sort the columns (micro-batches of all R ranks) by load, the highest first. A cell holds at
  most c rows of more than cap / (c + 1) tokens, so the first K - 1 columns hold at most (K - 1) · c · R of them, and
  column K costs at least as much as the next one of those rows. The first K columns hold at most K · R · cap tokens,
  whose cost is at most F(K · R · cap), that of the rows with the highest cost per token, the last one in part; the
  other columns carry the rest. So for every K: Σ loads ≥ Σ of those K rows' costs + (total - F(K · R · cap)) / R.
"""

from __future__ import annotations

import numpy as np

from equipoise._arrays import FloatArray, IntArray

_SHARES = (1, 2, 3, 4)


def mini_batch_bound(
    cost: FloatArray, tokens: IntArray, *, num_ranks: int, cap: int | None = None, rows_per_rank: int | None = None
) -> float:
    """Lower bound on the lockstep cost of any layout of these rows.

    Args:
        cost: cost of each row, shape (n,).
        tokens: tokens of each row, shape (n,).
        num_ranks: ranks that run each micro-batch together.
        cap: the most tokens in a micro-batch (a single row may exceed it); None for no cap.
        rows_per_rank: the fewest rows on any rank; None if ranks may have any number.

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
        return 0.0  # the argument about tokens does not hold for rows above the cap
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
