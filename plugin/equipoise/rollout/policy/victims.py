"""Which requests leave a crowded rank, and where they go."""

from __future__ import annotations

import heapq

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, iota, sums
from equipoise.rollout.policy.holdings import NO_LIMIT, Holdings

_ROWS = 64  # ranks sorted at once: small arrays stay in the processor's cache
_OWN_PLACE = 2**21  # integers below it need no ranking: three keys and a column fit into 62 bits


def pick(holdings: Holdings, excess: IntArray, *, longest: bool) -> IntArray:
    """The ``excess`` requests that leave each rank, rank by rank, shape (Σ excess,).

    Waiting requests leave first, because they have no KV cache; then the smallest KV caches or, with ``longest``, the
    requests expected to decode longest. Ties go to the longer expected length, then to list order. A request that has
    moved before leaves only if the others do not suffice.

    Args:
        holdings: the requests, at least of the ranks with excess.
        excess: how many requests leave each rank, at most all of them, shape (ranks,).
        longest: prefer long expected lengths to small caches.
    """
    donors = np.flatnonzero(excess)
    if donors.size == 0:
        return iota(0)
    known = longest or not bool(np.isnan(holdings.remaining[(excess > 0)[holdings.rank]]).all())
    leaving: list[IntArray] = []
    for some in np.split(donors, range(_ROWS, donors.size, _ROWS)):
        column = iota(int(holdings.held[some].max()))
        filled = column < holdings.held[some, None]
        at = np.where(filled, holdings.first[some, None] + column, 0)
        order = _in_order(_keys(holdings, at, longest=longest, known=known), filled)
        leaving.append(np.take_along_axis(at, order, axis=1)[column < excess[some, None]])
    return np.concatenate(leaving)


def _keys(holdings: Holdings, at: IntArray, *, longest: bool, known: bool) -> list[IntArray | FloatArray]:
    """Sort keys of the requests ``at``, the primary key first."""
    cache = 2 * holdings.kv_tokens[at] + holdings.running[at]
    if longest:
        return [holdings.running[at] + 2 * holdings.moved[at], -holdings.expected[at], cache]
    return [holdings.moved[at].astype(np.int64), cache, *([-holdings.expected[at]] if known else [])]


def _in_order(keys: list[IntArray | FloatArray], filled: BoolArray) -> IntArray:
    """Columns of each row, sorted by its keys; ties by column, unfilled columns last.

    One sort of integers that combine all keys is several times as fast as a stable sort per key.
    """
    width = filled.shape[1]
    code: IntArray = np.zeros(filled.shape, dtype=np.int64)
    for key in keys:
        place = key if key.dtype.kind == "i" and int(key.max()) < _OWN_PLACE else _places(key)
        code *= int(place.max()) + 1
        code += place.astype(np.int64, copy=False)
    code *= width
    code += iota(width)
    code[~filled] = NO_LIMIT
    code.sort(axis=1)
    return code % width


def _places(key: IntArray | FloatArray) -> IntArray:
    """Rank of each value among the distinct values of its row, from 0."""
    order = np.argsort(key, axis=1)
    ranked = np.take_along_axis(key, order, axis=1)
    place = np.zeros(key.shape, dtype=np.int64)
    np.cumsum(ranked[:, 1:] != ranked[:, :-1], axis=1, out=place[:, 1:])
    back = np.empty_like(place)
    np.put_along_axis(back, order, place, axis=1)
    return back


def quotas(count: int, room: IntArray) -> IntArray:
    """How many of ``count`` each rank takes: as even as room allows, with larger shares for emptier ranks.

    >>> quotas(5, np.array([1, 0, 4, 3])).tolist()
    [1, 0, 2, 2]
    """
    low, high = 0, int(min(count, room.max(initial=0)))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if int(np.minimum(room, middle).sum()) >= count else (middle + 1, high)
    share = np.minimum(room, max(low - 1, 0))
    more = np.flatnonzero(room >= low) if low else iota(0)
    emptiest = more[np.argsort(-room[more], kind="stable")]
    share[emptiest[: count - int(share.sum())]] += 1
    return share


def deal(weight: FloatArray, share: IntArray, load: FloatArray) -> IntArray:
    """Receiver of each request, in donor order, shape (n,).

    In each round, every rank with a share left gets one request, the heaviest for the least loaded rank, so that a
    donor's requests and their weights spread over all receivers.

    Args:
        weight: KV tokens or expected remaining tokens of each request.
        share: how many requests each rank takes; Σ share = n.
        load: the weight already on each rank.
    """
    to = np.empty(weight.size, dtype=np.int64)
    total = load.astype(np.float64, copy=True)
    start = 0
    for turn in range(int(share.max(initial=0))):
        takers = np.flatnonzero(share > turn)
        chunk = iota(takers.size) + start
        heavy = chunk[np.argsort(-weight[chunk], kind="stable")]
        idle = takers[np.argsort(total[takers], kind="stable")]
        to[heavy] = idle
        total[idle] += weight[heavy]
        start += takers.size
    return to


def fit(holdings: Holdings, leaving: IntArray, room: IntArray, capacity: IntArray) -> IntArray | None:
    """Receivers with enough memory, largest request first, or None if a request finds no place.

    A waiting request needs room for its tokens too, because its receiver prefills it.

    Args:
        holdings: all requests of all ranks.
        leaving: indices of the requests that leave.
        room: how many requests each rank can take, shape (ranks,).
        capacity: how many KV tokens each rank can hold, shape (ranks,).
    """
    need = np.where(holdings.running, holdings.kv_tokens, holdings.num_tokens)
    stays: BoolArray = np.ones(need.size, dtype=np.bool_)
    stays[leaving] = False
    used = sums(holdings.rank[stays], need[stays].astype(np.float64), holdings.num_ranks).astype(np.int64)
    free: IntArray = capacity - used
    to = np.empty(leaving.size, dtype=np.int64)
    order = np.argsort(-need[leaving], kind="stable")
    tokens = need[leaving[order]]
    start, left = 0, room
    while start < order.size:  # a round in which every receiver has room is one step
        takers = np.flatnonzero(left > 0)
        takers = takers[np.argsort(-free[takers], kind="stable")][: order.size - start]
        chunk = tokens[start : start + takers.size]
        if takers.size == 0 or bool((free[takers] < chunk).any()):
            break
        to[order[start : start + takers.size]] = takers
        free[takers] -= chunk
        start, left = start + takers.size, left - 1
    rest = _fit_singly(tokens[start:].tolist(), left.tolist(), free.tolist())
    if rest is None:
        return None
    to[order[start:]] = rest
    return to


def _fit_singly(tokens: list[int], left: list[int], free: list[int]) -> list[int] | None:
    """Receiver of each request, largest first: the rank with room that got the fewest, then the most memory."""
    able = [(0, -space, rank) for rank, space in enumerate(free) if left[rank] > 0]
    full: list[tuple[int, int, int]] = []  # no room for this request, but perhaps for a smaller one
    heapq.heapify(able)
    to: list[int] = []
    for size in tokens:
        while full and -full[0][0] >= size:
            space, got, rank = heapq.heappop(full)
            heapq.heappush(able, (got, space, rank))
        while able and -able[0][1] < size:
            got, space, rank = heapq.heappop(able)
            heapq.heappush(full, (space, got, rank))
        if not able:
            return None
        got, space, rank = able[0]
        to.append(rank)
        left[rank] -= 1
        if left[rank]:
            heapq.heapreplace(able, (got + 1, space + size, rank))
        else:
            heapq.heappop(able)
    return to
