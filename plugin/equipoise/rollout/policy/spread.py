"""Where requests start, before they have KV caches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from equipoise._arrays import IntArray, iota
from equipoise._checks import positive
from equipoise.errors import InvalidInput, must


def spread_siblings(group_ids: Sequence[Hashable], num_ranks: int) -> IntArray:
    """Rank of each request, shape (n,): siblings on different ranks, and equal counts up to 1.

    Responses to one prompt have similar lengths, so siblings of a hard prompt would keep a shared rank busy to the end.

    Args:
        group_ids: prompt group of each request, shape (n,).
        num_ranks: ranks that decode, at least 1.

    Raises:
        InvalidInput: ``num_ranks`` is not an integer of at least 1, or an id is not hashable.

    >>> spread_siblings(["a", "a", "b", "b", "c", "c"], 3).tolist()
    [0, 1, 2, 0, 1, 2]
    """
    ranks = positive("num_ranks", num_ranks, "pass the ranks that decode")
    try:
        number = {group: i for i, group in enumerate(dict.fromkeys(group_ids))}
    except TypeError as error:
        remedy = "pass the prompt group of each request"
        raise InvalidInput(must("group_ids", "be a list of hashable ids", group_ids, remedy)) from error
    by_group = np.argsort(np.array([number[group] for group in group_ids], dtype=np.int64), kind="stable")
    rank = np.empty(by_group.size, dtype=np.int64)
    rank[by_group] = iota(by_group.size) % ranks
    return rank
