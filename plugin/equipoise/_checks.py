"""Checks of input that more than one room makes."""

from __future__ import annotations

from typing import Any

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
