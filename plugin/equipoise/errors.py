"""The errors that Equipoise raises: one root, and leaves that are also the builtin a caller would expect."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EquipoiseError(Exception):
    """Root of every error that this package raises."""


class InvalidInput(EquipoiseError, ValueError):
    """An argument breaks its rule. The text reads ``<field> must <rule>, got <value>; <what to do>``."""


class InvalidConfig(InvalidInput):
    """A key or value of the configuration breaks its rule."""


class InfeasiblePlan(InvalidInput):
    """No plan satisfies two settings at once; the text names both and the nearest legal value."""


class UnknownName(EquipoiseError, LookupError):
    """A name is not in a registry; the text lists those that are."""


class DuplicateName(InvalidInput):
    """A name is registered twice."""


class PatchMismatch(EquipoiseError, RuntimeError):
    """A framework is not what a hook was written for, so that attaching would be unsafe."""


class EquipoiseWarning(UserWarning):
    """Something goes on, but not as asked."""


def must(field: str, rule: str, got: object, remedy: str) -> str:
    """Text of an input error.

    >>> must("dp_size", "be at least 1", 0, "pass the number of data-parallel ranks")
    'dp_size must be at least 1, got 0; pass the number of data-parallel ranks'
    """
    return f"{field} must {rule}, got {got!r}; {remedy}"


def nearest(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'x'?"`` or the list of what is known.

    >>> nearest("algoritm", ["algorithm", "cost"])
    "did you mean 'algorithm'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
