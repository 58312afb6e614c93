"""How long a rollout would have taken without moves, told from the lengths that it turned out to have."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise._arrays import FloatArray

_STAYS = 4096  # that the measured times span
_PULL = 1e-3  # towards the mean rate, relative to the time in the mean tier; says the rate of a tier hardly seen
_SLOWEST = 20.0  # times the mean step


@dataclass(frozen=True, order=True, kw_only=True)
class Stay:
    """A request on a replica.

    Attributes:
        since: when it came, in seconds.
        server: the replica.
        tokens: generated there.
    """

    since: float
    server: str
    tokens: int


def makespan_s(stays: Iterable[Stay], step_s: Callable[[int], float]) -> float:
    """Seconds from the first arrival until the last replica is done, if all on a replica decode one token a step.

    Args:
        stays: in any order; 0 if there are none.
        step_s: seconds of a token for each of so many requests, those that wait for a slot included.

    >>> both = [Stay(since=0.0, server="a", tokens=10), Stay(since=0.0, server="a", tokens=20)]
    >>> makespan_s(both, lambda count: float(count))  # 10 steps of two, 10 of one
    30.0
    """
    by_server: dict[str, list[Stay]] = defaultdict(list)
    for stay in sorted(stays):
        by_server[stay.server].append(stay)
    if not by_server:
        return 0.0
    first = min(each[0].since for each in by_server.values())
    return max(_done_at(each, step_s) for each in by_server.values()) - first


def _done_at(stays: list[Stay], step_s: Callable[[int], float]) -> float:
    now, decoded = stays[0].since, 0.0  # tokens that a request has that was there all the time
    ends: list[float] = []

    def advance(until: float) -> None:
        nonlocal now, decoded
        while ends and now < until:
            each_s = step_s(len(ends))
            done_at = now + (ends[0] - decoded) * each_s
            if done_at > until:
                decoded += (until - now) / each_s
                break
            now, decoded = done_at, heapq.heappop(ends)
        now = max(now, until) if until < float("inf") else now

    for stay in stays:
        advance(stay.since)
        heapq.heappush(ends, decoded + stay.tokens)
    advance(float("inf"))
    return now


class Replay:
    """Collects what a rollout did, and what it would have been without moves: each response where it started."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._stays: list[Stay] = []
        self._unmoved: list[Stay] = []
        self._last = 0.0

    def ended(self, stays: Sequence[Stay], *, at: float) -> None:
        """A response has ended; where it was, one replica after the other, and when the last let it go."""
        if stays:
            self._stays += stays
            self._unmoved.append(replace(stays[0], tokens=sum(stay.tokens for stay in stays)))
            self._last = max(self._last, at)

    def saved_s(self, step_s: Callable[[int], float]) -> float:
        """Seconds that the moves saved; below 0 where they cost time.

        The rollout is replayed as it was and as it would have been, with measured step times. The ratio of the two,
        times the seconds that it really took, is what it would have taken: so prefills and pauses count for both, and
        without moves nothing is saved. Requests come when they came.
        """
        replayed_s = makespan_s(self._stays, step_s)
        if replayed_s <= 0:
            return 0.0
        real_s = self._last - min(stay.since for stay in self._stays)
        return real_s * (makespan_s(self._unmoved, step_s) / replayed_s - 1)


class StepTimes:
    """Seconds between two tokens of a request by the decode size of its replica, from what stays took.

    A stay decodes as many tokens as its seconds in each tier times the rate of that tier, which are then a linear
    least-squares problem over all stays.
    """

    def __init__(self) -> None:
        self._stays: deque[tuple[int, Mapping[int, float]]] = deque(maxlen=_STAYS)

    def measured(self, *, tokens: int, tier_seconds: Mapping[int, float]) -> None:
        """Take note of a stay.

        Args:
            tokens: decoded.
            tier_seconds: that the replica spent on each request in each tier meanwhile.
        """
        if tokens > 0 and any(tier_seconds.values()):
            self._stays.append((tokens, tier_seconds))

    def fit(self) -> Mapping[int, float]:
        """Seconds of a token by tier, those of a tier never seen being the mean."""
        tiers = sorted({tier for _, seconds in self._stays for tier in seconds})
        if not tiers:
            return defaultdict(lambda: 1.0)
        rows = [[seconds.get(tier, 0.0) for tier in tiers] for _, seconds in self._stays]
        times: FloatArray = np.array(rows, dtype=np.float64)
        tokens: FloatArray = np.array([tokens for tokens, _ in self._stays], dtype=np.float64)
        mean = float(tokens.sum() / times.sum())
        pull = _PULL**0.5 * float(np.linalg.norm(times)) / len(tiers) ** 0.5 * np.eye(len(tiers))
        system = np.vstack([times, pull])
        left_over = np.concatenate([tokens - mean * times.sum(axis=1), np.zeros(len(tiers))])
        rates = np.linalg.lstsq(system, left_over)[0] + mean
        found = 1 / np.maximum(rates, mean / _SLOWEST)
        return defaultdict(lambda: 1 / mean, zip(tiers, found.tolist(), strict=True))
