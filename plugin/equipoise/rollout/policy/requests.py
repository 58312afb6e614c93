"""The planner's input and output: requests and moves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from equipoise._checks import MOST_TOKENS, is_amount, is_whole
from equipoise.errors import InvalidInput, must


@dataclass(frozen=True, slots=True)
class Request:
    """An unfinished request of a rank.

    Args:
        id: the engine's name for it; unique over all ranks.
        num_tokens: prompt and generated tokens so far, at least 0.
        kv_tokens: tokens whose keys and values the rank holds and a move sends, at least 0.
        running: whether it decodes now; a waiting request moves without a KV cache.
        expected_remaining: expected remaining tokens, at least 0; None if unknown.

    Raises:
        InvalidInput: a count is not an integer from 0 to 2**40, ``running`` is not a bool, or ``expected_remaining`` is
            not a finite number of at least 0.

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


class Move(NamedTuple):
    """A request that moves to another rank. A named tuple, because a plan for a large cluster has tens of thousands.

    >>> Move(0, 1, "a").to_rank
    1
    """

    from_rank: int
    to_rank: int
    request_id: Hashable


def _whole(request: Hashable, field: str, value: Any) -> None:
    if not is_whole(value) or value > MOST_TOKENS:
        rule = f"be a whole number of at least 0{' and at most 2**40' if is_whole(value) else ''}"
        raise InvalidInput(must(f"{field} of request {request!r}", rule, value, "pass the tokens of the request"))
