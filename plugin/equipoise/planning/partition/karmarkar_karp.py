"""Karmarkar-Karp largest differencing into k parts, of equal size or free.

N. Karmarkar and R. M. Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982; k-way form after
W. Michiels et al., "Performance ratios for the differencing method", 2012. A state holds k partial sums; the two states
of widest spread are merged, largest sum with smallest, until one is left. A part is a tree of merges, so that a merge
costs O(k log k) whatever the parts hold.
"""

from __future__ import annotations

import heapq

import numpy as np

from equipoise._arrays import FloatArray, IntArray, iota

_NO_ROW = -1


def equal_size(weights: FloatArray, k: int) -> IntArray:
    """Part of each row, shape (n,), each part with n / k rows.

    The first states are runs of k rows in falling order, one row a part.

    Args:
        weights: at least 0, shape (n,), n a multiple of k.
        k: number of parts.
    """
    n = weights.size
    falling = np.argsort(-weights, kind="stable").reshape(-1, k)
    # sums of the parts, falling, and a node for each: node i < n is row i, later ones join two nodes
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
    """Part of each row, shape (n,), parts of any size.

    Only the non-empty parts of a state are stored: at first each state is a single row, and most merges join two
    states that still fit side by side.

    Args:
        weights: at least 0, shape (n,).
        k: number of parts.
    """
    n = weights.size
    if k == 1:
        return np.zeros(n, dtype=np.int64)
    left: list[int] = [_NO_ROW] * n  # node i < n is row i; node i >= n joins left[i] and right[i]
    right: list[int] = [_NO_ROW] * n
    sums_of: list[list[float]] = [[float(w)] for w in weights]
    nodes_of: list[list[int]] = [[i] for i in range(n)]
    heap = [(-float(w), i) for i, w in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first = heapq.heappop(heap)
        _, second = heapq.heappop(heap)
        sums, nodes = _merge(sums_of[first], nodes_of[first], sums_of[second], nodes_of[second], k, left, right)
        sums_of[first], nodes_of[first] = sums, nodes
        sums_of[second], nodes_of[second] = [], []
        heapq.heappush(heap, (-(sums[0] - (sums[-1] if len(sums) == k else 0.0)), first))
    return _leaves(nodes_of[heap[0][1]], left, right, n)


def _merge(
    sums_a: list[float],
    nodes_a: list[int],
    sums_b: list[float],
    nodes_b: list[int],
    k: int,
    left: list[int],
    right: list[int],
) -> tuple[list[float], list[int]]:
    """Largest of a with smallest of b; where one side has run out of parts, the other's part stands alone."""
    overlap = len(sums_a) + len(sums_b) - k
    if overlap <= 0:
        pairs = list(zip(sums_a + sums_b, nodes_a + nodes_b, strict=True))
    else:
        alone_a, alone_b = len(sums_a) - overlap, len(sums_b) - overlap
        pairs = list(zip(sums_a[:alone_a], nodes_a[:alone_a], strict=True))
        pairs += zip(sums_b[:alone_b], nodes_b[:alone_b], strict=True)
        for i in range(overlap):
            a, b = alone_a + i, len(sums_b) - 1 - i
            left.append(nodes_a[a])
            right.append(nodes_b[b])
            pairs.append((sums_a[a] + sums_b[b], len(left) - 1))
    pairs.sort(key=lambda pair: -pair[0])
    return [s for s, _ in pairs], [node for _, node in pairs]


def _leaves(roots: list[int], left: list[int], right: list[int], n: int) -> IntArray:
    part = np.empty(n, dtype=np.int64)
    for p, root in enumerate(roots):
        stack = [root]
        while stack:
            node = stack.pop()
            if node < n:
                part[node] = p
            else:
                stack += (left[node], right[node])
    return part
