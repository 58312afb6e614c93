"""Karmarkar-Karp largest differencing into k parts, of equal or any size.

N. Karmarkar and R. M. Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982; k-way form after
W. Michiels et al., "Performance ratios for the differencing method", 2012. A state holds k partial sums; the two states
with the widest spread are merged, largest sum with smallest, until one is left. A part is a tree of merges, so a merge
costs O(k log k) however many rows the parts hold.
"""

from __future__ import annotations

import heapq

import numpy as np

from equipoise._arrays import FloatArray, IntArray, iota


def equal_size(weights: FloatArray, k: int) -> IntArray:
    """Part of each row, shape (n,), with n / k rows in each; n must be a multiple of k.

    The first states are runs of k rows by descending weight, one row per part.
    """
    n = weights.size
    falling = np.argsort(-weights, kind="stable").reshape(-1, k)
    # descending sums of the parts, and a node for each: node i < n is row i, later nodes join two
    states: list[tuple[FloatArray, IntArray]] = [(weights[rows], rows) for rows in falling]
    joined: list[tuple[IntArray, IntArray]] = []
    heap = [(-float(sums[0] - sums[-1]), i) for i, (sums, _) in enumerate(states)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first = heapq.heappop(heap)
        _, second = heapq.heappop(heap)
        (sums_a, nodes_a), (sums_b, nodes_b) = states[first], states[second]
        sums = sums_a + sums_b[::-1]
        order = np.argsort(-sums, kind="stable")
        joined.append((nodes_a[order], nodes_b[::-1][order]))
        states[first] = (sums[order], n + (len(joined) - 1) * k + iota(k))
        heapq.heappush(heap, (-float(sums[order[0]] - sums[order[-1]]), first))
    part = np.empty(n + len(joined) * k, dtype=np.int64)
    part[states[heap[0][1]][1]] = iota(k)
    for m in range(len(joined) - 1, -1, -1):
        left, right = joined[m]
        part[left] = part[right] = part[n + m * k : n + (m + 1) * k]
    return part[:n]


def free_size(weights: FloatArray, k: int) -> IntArray:
    """Part of each row, shape (n,), with any number of rows in each.

    A state stores only its non-empty parts: each state starts as a single row, and most merges join two states that
    still fit side by side.
    """
    n = weights.size
    if k == 1:
        return np.zeros(n, dtype=np.int64)
    joined: list[tuple[int, int]] = []  # node i < n is row i; node n + i joins the two of joined[i]
    states: list[list[tuple[float, int]]] = [[(float(w), i)] for i, w in enumerate(weights)]  # descending sums, nodes
    heap = [(-float(w), i) for i, w in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first = heapq.heappop(heap)
        _, second = heapq.heappop(heap)
        a, b = states[first], states[second]
        overlap = max(0, len(a) + len(b) - k)
        # the largest of a with the smallest of b; a part without a partner stays as it is
        merged = a[: len(a) - overlap] + b[: len(b) - overlap]
        for (sum_a, node_a), (sum_b, node_b) in zip(a[len(a) - overlap :], reversed(b), strict=False):
            merged.append((sum_a + sum_b, n + len(joined)))
            joined.append((node_a, node_b))
        merged.sort(key=lambda state: -state[0])
        states[first], states[second] = merged, []
        heapq.heappush(heap, (-(merged[0][0] - (merged[-1][0] if len(merged) == k else 0.0)), first))
    part = np.empty(n + len(joined), dtype=np.int64)
    part[[node for _, node in states[heap[0][1]]]] = iota(len(states[heap[0][1]]))
    for node in range(len(joined) - 1, -1, -1):
        part[list(joined[node])] = part[n + node]
    return part[:n]
