"""The requests of all ranks as arrays, after input checks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, iota
from equipoise._checks import falling, is_whole
from equipoise.errors import InfeasiblePlan, InvalidInput, must
from equipoise.rollout.policy.requests import Request

NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Requests in rank order: those of rank 0 first. Arrays are per request, shape (n,), or per rank, shape (ranks,).

    Attributes:
        held: number of requests on each rank, running and waiting.
        kv_tokens: KV tokens of each request, 0 while it waits.
        num_tokens: tokens of each request.
        running: whether each request decodes.
        remaining: expected remaining tokens; NaN if unknown.
        moved: whether each request has moved before; others are preferred.
    """

    held: IntArray
    kv_tokens: IntArray
    num_tokens: IntArray
    running: BoolArray
    remaining: FloatArray
    moved: BoolArray

    @property
    def num_ranks(self) -> int:
        """Number of ranks, including those without requests."""
        return self.held.size

    @cached_property
    def rank(self) -> IntArray:
        """Rank of each request, shape (n,)."""
        return np.repeat(iota(self.num_ranks), self.held)

    @cached_property
    def first(self) -> IntArray:
        """Index of each rank's first request, shape (ranks,)."""
        return np.cumsum(self.held) - self.held

    @cached_property
    def expected(self) -> FloatArray:
        """Expected remaining tokens; a request with unknown length is expected to double.

        Response lengths have a heavy tail: the longer a request has run, the longer it still will (Lindy's law).
        """
        unknown = np.isnan(self.remaining)
        return np.where(unknown, np.maximum(self.num_tokens, 1), self.remaining) if unknown.any() else self.remaining


def checked_ranks(requests_by_rank: Sequence[Sequence[Request] | None]) -> list[Sequence[Request]]:
    """The requests of each rank, after checking that no rank is missing and no id occurs twice.

    Raises:
        InvalidInput: the list is empty or not a list, a rank is None or not a list, an entry is not a request, or an id
            is not hashable or occurs twice.
    """
    if not _is_list(requests_by_rank):
        got, remedy = type(requests_by_rank).__name__, "pass the requests of rank 0 first"
        raise InvalidInput(must("requests_by_rank", "be a list with an entry for each rank", got, remedy))
    if not requests_by_rank:
        raise InvalidInput(must("requests_by_rank", "have an entry for each rank", [], "pass [] for an idle rank"))
    ranks: list[Sequence[Request]] = []
    for rank, requests in enumerate(requests_by_rank):
        if requests is None:
            remedy = "wait for its state, or pass [] if it is idle"
            raise InvalidInput(must(f"requests_by_rank[{rank}]", "be the requests of that rank", None, remedy))
        if not _is_list(requests):
            got, remedy = type(requests).__name__, "pass [] for an idle rank"
            raise InvalidInput(must(f"requests_by_rank[{rank}]", "be a list of requests", got, remedy))
        ranks.append(requests)
    try:
        distinct = len({request.id for requests in ranks for request in requests})
    except (AttributeError, TypeError) as error:
        raise InvalidInput(_no_request(ranks)) from error
    if distinct != sum(map(len, ranks)):
        raise InvalidInput(_held_twice(ranks))
    return ranks


def checked_ids(field: str, ids: Collection[Hashable]) -> frozenset[Hashable]:
    """The ids, after checking them.

    Raises:
        InvalidInput: not a collection, a single string, or an id that is not hashable.
    """
    try:
        found: frozenset[Hashable] | None = None if isinstance(ids, str) else frozenset(ids)
    except TypeError:
        found = None
    if found is None:
        raise InvalidInput(must(field, "be a collection of request ids", ids, "pass () if there is none"))
    return found


def checked_tiers(tiers: Sequence[int]) -> IntArray:
    """The tiers in ascending order.

    Raises:
        InvalidInput: none, one that is no whole number of at least 1, or not in falling order.
    """
    found = falling("tiers", tiers, "list the decode-graph sizes from the largest to the smallest, each once")
    return np.array([min(tier, NO_LIMIT) for tier in found[::-1]], dtype=np.int64)


def per_rank(field: str, limit: int | Sequence[int] | None, num_ranks: int) -> IntArray:
    """A limit per rank, from one number, one number per rank, or None.

    Raises:
        InvalidInput: not an integer of at least 0, or not one per rank.
    """
    if limit is None:
        return np.full(num_ranks, NO_LIMIT, dtype=np.int64)
    given: list[Any] = list(limit) if _is_many(limit) else [limit] * num_ranks
    if len(given) != num_ranks:
        raise InvalidInput(
            must(field, f"have one value for each of {num_ranks} ranks", len(given), "or pass one number")
        )
    for rank, value in enumerate(given):
        if not is_whole(value):
            raise InvalidInput(must(f"{field}[{rank}]", "be a whole number of at least 0", value, "or pass None"))
    return np.array([min(int(value), NO_LIMIT) for value in given], dtype=np.int64)


def check_room(ranks: Sequence[Sequence[Request]], slots: IntArray) -> None:
    """Check that the slots of all ranks can hold the running requests.

    Raises:
        InfeasiblePlan: more requests run than there are slots.
    """
    room = int(np.minimum(slots, NO_LIMIT // slots.size).sum())
    if sum(map(len, ranks)) <= room:
        return
    num_running = sum(bool(request.running) for requests in ranks for request in requests)
    if num_running > room:
        least = -(-num_running // slots.size)
        remedy = f"give each rank at least {least} slots, or mark those that wait with running=False"
        raise InfeasiblePlan(must("slots", f"hold the {num_running} running requests of all ranks", room, remedy))


def gather(
    ranks: Sequence[Sequence[Request]],
    moved: frozenset[Hashable] = frozenset(),
    *,
    tokens: bool = True,
    tokens_if_waiting: bool = True,
    lengths: bool = True,
) -> Holdings:
    """The arrays of these requests.

    Args:
        ranks: requests of each rank.
        moved: ids of requests that moved before.
        tokens: whether ``num_tokens`` is needed; if not, it may stay 0.
        tokens_if_waiting: whether ``num_tokens`` is needed if some requests wait.
        lengths: whether expected lengths are needed even if none is known.
    """
    held = np.array([len(requests) for requests in ranks], dtype=np.int64)
    count = int(held.sum())
    cache = np.fromiter((r.kv_tokens if r.running else -1 for row in ranks for r in row), np.int64, count)
    remaining = np.fromiter((r.expected_remaining for row in ranks for r in row), np.float64, count)  # NaN for None
    num_tokens, unknown, running = np.zeros(count, dtype=np.int64), np.isnan(remaining), cache >= 0
    doubles = bool(unknown.any()) and (lengths or not bool(unknown.all()))  # see Holdings.expected
    if tokens or doubles or (tokens_if_waiting and not bool(running.all())):
        num_tokens = np.fromiter((r.num_tokens for row in ranks for r in row), np.int64, count)
    marks = np.zeros(count, dtype=np.bool_)
    if moved:
        marks = np.fromiter((r.id in moved for row in ranks for r in row), np.bool_, count)
    return Holdings(
        held=held,
        kv_tokens=np.maximum(cache, 0, out=cache),
        num_tokens=num_tokens,
        running=running,
        remaining=remaining,
        moved=marks,
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, Sequence)) and not isinstance(value, (str, bytes))


def _is_many(value: Any) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _held_twice(ranks: list[Sequence[Request]]) -> str:
    where: dict[Hashable, int] = {}
    for rank, requests in enumerate(ranks):
        for request in requests:
            if request.id in where:
                held = (
                    f"held by ranks {where[request.id]} and {rank}"
                    if where[request.id] != rank
                    else f"held twice by rank {rank}"
                )
                return must(
                    "a request id", "be held by one rank, once", request.id, f"it is {held}: name requests apart"
                )
            where[request.id] = rank
    raise AssertionError("no id is held twice")


def _no_request(ranks: list[Sequence[Request]]) -> str:
    for rank, requests in enumerate(ranks):
        for i, request in enumerate(requests):
            field = f"requests_by_rank[{rank}][{i}]"
            if not hasattr(request, "id"):
                return must(field, "be a Request", request, "tell of each by equipoise.Request")
            try:
                hash(request.id)
            except TypeError:
                return must(f"id of {field}", "be hashable", request.id, "pass a number, a string or a tuple of them")
    raise AssertionError("each request has a hashable id")
