"""Checks of input that more than one room makes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from operator import index
from typing import Any, cast

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
    try:
        whole = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        whole = -1
    if whole < 1:
        raise InvalidInput(must(field, "be a whole number of at least 1", value, remedy))
    return whole


def of_kind(field: str, value: Any, kind: type | tuple[type, ...], remedy: str) -> None:
    """Raise unless ``value`` is an instance of ``kind``.

    Raises:
        InvalidInput: it is of another kind.

    >>> of_kind("spec", 3, int, "pass a number")
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(each.__name__ for each in kinds)
        raise InvalidInput(must(field, f"be a {names}", f"{type(value).__name__} {value!r}"[:80], remedy))


def numbers(config: Any, *, whole: Sequence[str] = (), real: Sequence[str] = (), remedy: str) -> None:
    """Raise unless these attributes of ``config`` are numbers: whole ones, or any; a bool is none.

    Raises:
        InvalidInput: one is of another kind.
    """
    for name in (*whole, *real):
        value = getattr(config, name)
        kind, abstract = ("whole number", Integral) if name in whole else ("number", Real)
        if not _is_number(value, abstract):
            raise InvalidInput(must(name, f"be a {kind}", value, remedy))


def falling(field: str, values: Any, remedy: str) -> None:
    """Raise unless ``values`` are whole numbers of at least 1 in a sequence that falls from one to the next.

    Raises:
        InvalidInput: they are not.

    >>> falling("tiers", (8, 4), "pass sizes")
    """
    listed = list(cast("Sequence[Any]", values)) if isinstance(values, (list, tuple)) else []
    whole = bool(listed) and all(_is_number(x, Integral) and x >= 1 for x in listed)
    if not whole or listed != sorted(set(listed), reverse=True):
        rule = "be whole numbers from 1 up that fall from step to step"
        raise InvalidInput(must(field, rule, cast(object, values), remedy))


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


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
