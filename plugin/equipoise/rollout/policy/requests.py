"""What the planner is told of a request, and what it answers."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from equipoise._arrays import IntArray
from equipoise._checks import MOST_TOKENS, is_amount, is_whole
from equipoise.errors import InvalidInput, must


@dataclass(frozen=True, slots=True)
class Request:
    """An unfinished request of a rank.

    Args:
        id: what the engine calls it; on one rank of the group only.
        num_tokens: prompt and generated tokens so far, at least 0.
        kv_tokens: tokens whose keys and values the rank holds, at least 0; what a move sends.
        running: whether it decodes now; one that waits is moved without a KV cache.
        expected_remaining: tokens that it is expected to generate still, at least 0; None where nothing is known.

    Raises:
        InvalidInput: a count that is no whole number from 0 to 2**40, ``running`` neither True nor False, or an
            ``expected_remaining`` that is no number, negative or not finite.

    >>> Request("a", num_tokens=300, kv_tokens=300).running
    True
    """

    id: Hashable
    num_tokens: int
    kv_tokens: int
    running: bool = True
    expected_remaining: float | None = None

    def __post_init__(self) -> None:
        _whole(self.id, "num_tokens", self.num_tokens)
        _whole(self.id, "kv_tokens", self.kv_tokens)
        if self.running not in (True, False):
            remedy = "False marks a request that waits"
            raise InvalidInput(must(f"running of request {self.id!r}", "be True or False", self.running, remedy))
        left = self.expected_remaining
        if left is not None and not is_amount(left):
            field = f"expected_remaining of request {self.id!r}"
            raise InvalidInput(must(field, "be finite and at least 0", left, "pass None if unknown"))


@dataclass(frozen=True, slots=True)
class Move:
    """One request that leaves a rank for another."""

    from_rank: int
    to_rank: int
    request_id: Hashable


def as_moves(from_rank: IntArray, to_rank: IntArray, request_id: Sequence[Hashable]) -> list[Move]:
    """Moves from an array for each field: a third of the time of as many calls of `Move`, which is frozen.

    >>> as_moves(np.array([0, 0]), np.array([1, 2]), ["a", "b"])[1]
    Move(from_rank=0, to_rank=2, request_id='b')
    """
    moves = _blank_moves(len(request_id))
    ranks = np.array(range(1 + int(max(from_rank.max(initial=0), to_rank.max(initial=0)))), dtype=object)  # shared
    fields = {"from_rank": ranks[from_rank], "to_rank": ranks[to_rank], "request_id": request_id}
    for field, values in fields.items():
        fill: Callable[[Move, object], None] = getattr(Move, field).__set__
        deque(map(fill, moves, values), maxlen=0)
    return moves


def _blank_moves(count: int) -> list[Move]:
    """Moves without values, made in one call in which the garbage collector does not look for any among them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(map(object.__new__, repeat(Move, count)))
    finally:
        if collects:
            gc.enable()


def _whole(request: Hashable, field: str, value: Any) -> None:
    if not is_whole(value) or value > MOST_TOKENS:
        rule = f"be a whole number of at least 0{' and at most 2**40' if is_whole(value) else ''}"
        raise InvalidInput(must(f"{field} of request {request!r}", rule, value, "pass the tokens of the request"))
