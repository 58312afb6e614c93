"""Checks of input that more than one room makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise._arrays import IntArray
from equipoise.errors import InvalidInput, must


def positive(field: str, value: Any, remedy: str) -> int:
    """``value`` as an int of at least 1.

    Raises:
        InvalidInput: not a whole number (a bool is none) or below 1.

    >>> positive("k", 3, "pass the number of parts")
    3

    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise InvalidInput(must(field, "be a whole number of at least 1", value, remedy))
    return value.__index__()


MOST_TOKENS = 2**40
"""The longest row that is taken: sums of thousands of them are still exact in float64."""


def as_vector(field: str, values: Any, remedy: str) -> npt.NDArray[Any]:
    """``values`` as a numpy array of one dimension.

    Raises:
        InvalidInput: rows of unequal size, another number of dimensions, or a tensor that is not on the CPU.

    >>> as_vector("weights", [3, 1], "pass one weight per row")
    array([3, 1])

    """
    try:
        array: npt.NDArray[Any] = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "be a list, a numpy array or a CPU tensor of one dimension"
        raise InvalidInput(must(field, rule, type(values).__name__, f"{remedy} ({error})")) from error
    if array.ndim != 1:
        raise InvalidInput(must(field, "be one-dimensional", array.shape, remedy))
    return array


def as_lengths(lengths: Any, *, field: str = "lengths") -> IntArray:
    """Lengths in tokens as int64, shape (n,), from a list, a numpy array or a CPU tensor.

    Raises:
        InvalidInput: empty, not one-dimensional, not whole numbers, NaN, infinite, negative or above 2**40.

    >>> as_lengths([3, 1])
    array([3, 1])

    """
    array = as_vector(field, lengths, "pass one length per row")
    if array.size == 0:
        raise InvalidInput(must(field, "hold at least one row", [], "skip the step when the batch is empty"))
    if array.dtype.kind not in "iuf":
        raise InvalidInput(must(field, "be whole numbers", str(array.dtype), "pass the tokens of each row as integers"))
    if array.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
        if wrong.size:
            row = int(wrong[0])
            raise InvalidInput(
                must(f"{field}[{row}]", "be a whole number", float(array[row]), "pass the tokens of each row")
            )
    if int(array.min()) < 0:
        row = int(np.argmin(array))
        raise InvalidInput(must(f"{field}[{row}]", "be at least 0", int(array[row]), "pass the tokens of each row"))
    if int(array.max()) > MOST_TOKENS:
        row = int(np.argmax(array))
        raise InvalidInput(
            must(f"{field}[{row}]", f"be at most {MOST_TOKENS}", int(array[row]), "pass the tokens of each row")
        )
    return array.astype(np.int64, copy=False)
