"""Array types of the planner, and counts and sums with exact types."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def counts(index: IntArray, num_bins: int) -> IntArray:
    """Number of occurrences of each of 0 … num_bins - 1 in ``index``, shape (num_bins,)."""
    return np.bincount(index, minlength=num_bins).astype(np.int64, copy=False)


def sums(index: IntArray, weights: FloatArray, num_bins: int) -> FloatArray:
    """Sum of the weights in each bin, shape (num_bins,).

    >>> sums(np.array([0, 2, 2]), np.array([1.0, 2.0, 3.0]), 3).tolist()
    [1.0, 0.0, 5.0]
    """
    return np.asarray(np.bincount(index, weights=weights, minlength=num_bins), dtype=np.float64)


def int_sums(index: IntArray, values: IntArray, num_bins: int) -> IntArray:
    """Sum of the integers in each bin, shape (num_bins,); exact up to 2**53."""
    return sums(index, values.astype(np.float64), num_bins).astype(np.int64)


def positions(index: IntArray, num_bins: int) -> list[IntArray]:
    """Positions of each of 0 … num_bins - 1 in ``index``, ascending.

    >>> [each.tolist() for each in positions(np.array([1, 0, 1]), 2)]
    [[1], [0, 2]]
    """
    return np.split(np.argsort(index, kind="stable"), np.cumsum(counts(index, num_bins))[:-1])


def iota(n: int) -> IntArray:
    """0 … n - 1 as int64.

    >>> iota(3).tolist()
    [0, 1, 2]
    """
    return np.arange(n, dtype=np.int64)
