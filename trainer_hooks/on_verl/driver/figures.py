"""Length statistics of a batch, next to those of its plan."""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from equipoise._arrays import FloatArray, IntArray


def length_figures(lengths: IntArray, shares: Sequence[IntArray], prefix: str) -> dict[str, Any]:
    """Verl's own statistics of tokens per rank, for rows divided into ``shares``."""
    from verl.utils.seqlen_balancing import log_seqlen_unbalance

    partitions = [share.tolist() for share in shares]
    return log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=partitions, prefix=prefix)


def rank_over_bound(cost: FloatArray, dp_size: int, num_mini_batches: int) -> float:
    """Cost of the costliest rank ÷ lower bound, summed over mini-batches, for rows in verl's dispatch order."""
    by_rank = cost.reshape(dp_size, num_mini_batches, -1)
    totals = by_rank.sum(axis=2)
    bound = float(totals.mean(axis=0).clip(min=by_rank.max(axis=(0, 2))).sum())
    return float(totals.max(axis=0).sum() / bound) if bound else 1.0
