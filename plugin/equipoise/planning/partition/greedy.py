"""Longest processing time first, on a heap.

R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969: heaviest row first, each to
the part with the least load. With a limit on rows, a full part leaves the heap.
"""

from __future__ import annotations

import heapq

import numpy as np

from equipoise._arrays import FloatArray, IntArray


def longest_first(weights: FloatArray, k: int, *, max_rows: IntArray | None = None) -> IntArray:
    """Part of each row, shape (n,).

    ``weights``, shape (n,), are at least 0; ``max_rows``, shape (k,), limits each part's rows and sums to n or more.
    """
    part = np.empty(weights.size, dtype=np.int64)
    limits = [weights.size] * k if max_rows is None else max_rows.tolist()
    # (load, rows, part): the part with fewer rows breaks a tie
    heap = [(0.0, 0, p) for p in range(k) if limits[p] > 0]
    values = weights.tolist()
    for row in np.argsort(-weights, kind="stable").tolist():
        load, rows, p = heap[0]
        part[row] = p
        if rows + 1 < limits[p]:
            heapq.heapreplace(heap, (load + values[row], rows + 1, p))
        else:
            heapq.heappop(heap)
    return part
