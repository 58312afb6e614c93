"""Input checks that several rooms share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Integral, Real
from operator import index
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from equipoise._arrays import FloatArray, IntArray
from equipoise.errors import InvalidInput, must


def positive(field: str, value: Any, remedy: str) -> int:
    """``value`` as an int of at least 1.

    Raises:
        InvalidInput: not an integer (bools are not) or below 1.

    >>> positive("k", 3, "pass the number of parts")
    3

    """
    if not is_whole(value, 1):
        raise InvalidInput(must(field, "be a whole number of at least 1", value, remedy))
    return index(value)


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is an integer of at least ``least``; bools are not.

    >>> is_whole(3), is_whole(True), is_whole("3")
    (True, False, False)
    """
    try:
        return not isinstance(value, bool) and index(value) >= least
    except TypeError:
        return False


def is_amount(value: Any) -> bool:
    """Whether it is a finite number of at least 0.

    >>> is_amount(0.5), is_amount(float("nan")), is_amount("0.5")
    (True, False, False)
    """
    try:
        return bool(0 <= value < float("inf"))
    except (TypeError, ValueError):
        return False


def of_kind(field: str, value: Any, kind: type | tuple[type, ...], remedy: str) -> None:
    """Raise unless ``value`` is an instance of ``kind``.

    Raises:
        InvalidInput: it is not.

    >>> of_kind("spec", 3, int, "pass a number")
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(each.__name__ for each in kinds)
        raise InvalidInput(must(field, f"be a {names}", f"{type(value).__name__} {value!r}"[:80], remedy))


def numbers(config: Any, *, whole: Sequence[str] = (), real: Sequence[str] = (), remedy: str) -> None:
    """Raise unless these attributes of ``config`` are integers or real numbers; bools are neither.

    Raises:
        InvalidInput: one of them is not.
    """
    kinds = {**dict.fromkeys(whole, (Integral, "whole number")), **dict.fromkeys(real, (Real, "number"))}
    for name, (kind, words) in kinds.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise InvalidInput(must(name, f"be a {words}", value, remedy))


def falling(field: str, values: Any, remedy: str) -> tuple[int, ...]:
    """``values`` as strictly descending integers of at least 1.

    Raises:
        InvalidInput: they are not.

    >>> falling("tiers", [8, 4], "pass sizes")
    (8, 4)
    """
    many = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    found: tuple[Any, ...] = tuple(cast("Iterable[Any]", values)) if many else ()
    if not found or not all(is_whole(x, 1) for x in found) or any(a <= b for a, b in pairwise(found)):
        got = found if many else cast(object, values)
        raise InvalidInput(must(field, "be whole numbers of at least 1 in descending order", got, remedy))
    return tuple(index(x) for x in found)


def finite(field: str, values: FloatArray, remedy: str | Callable[[int], str], *, above: bool = False) -> None:
    """Raise unless all values are finite and at least 0, or above 0.

    Args:
        field: name of the values, shape (n,).
        values: the values to check.
        remedy: what to do, or a function that says so for the first invalid row.
        above: also reject 0.

    Raises:
        InvalidInput: a value is not; names it.

    >>> finite("weights", np.array([0.0, 2.5]), "check the cost model")
    """
    wrong = np.flatnonzero(~np.isfinite(values) | (values <= 0 if above else values < 0))
    if wrong.size:
        row = int(wrong[0])
        rule = "be finite and above 0" if above else "be finite and at least 0"
        advice = remedy if isinstance(remedy, str) else remedy(row)
        raise InvalidInput(must(f"{field}[{row}]", rule, float(values[row]), advice))


MOST_TOKENS = 2**40
"""The longest legal row: sums of thousands of them are still exact in float64."""


def as_vector(field: str, values: Any, remedy: str) -> npt.NDArray[Any]:
    """``values`` as a one-dimensional numpy array.

    Raises:
        InvalidInput: ragged, not one-dimensional, or a tensor that is not on the CPU.

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
        InvalidInput: empty, not one-dimensional, or not integers from 0 to 2**40.

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
