"""How long a rollout would have taken without moves, given the actual response lengths."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equipoise._arrays import FloatArray

_STAYS = 4096  # most recent stays that step times are fitted to
_PULL = 1e-3  # ridge weight that pulls a tier's rate to the mean; decides for tiers that were hardly seen
_SLOWEST = 20.0  # longest step of a tier, in mean steps


@dataclass(frozen=True, order=True, kw_only=True)
class Stay:
    """A request on a replica.

    Attributes:
        since: time of arrival, in seconds.
        server: id of the replica.
        tokens: tokens generated there.
    """

    since: float
    server: str
    tokens: int


def makespan_s(stays: Iterable[Stay], step_s: Callable[[int], float]) -> float:
    """Return the seconds from the first arrival until the last replica has finished.

    All requests on a replica decode one token per step.

    Args:
        stays: in any order; if empty, the result is 0.
        step_s: seconds per token with this many requests, including those that wait for a slot.

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
    now, decoded = stays[0].since, 0.0  # tokens of a request that was there from the start
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
    """Collects the stays of a rollout, and their counterparts without moves: each response where it started."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._stays: list[Stay] = []
        self._unmoved: list[Stay] = []
        self._last = 0.0

    def ended(self, stays: Sequence[Stay], *, at: float) -> None:
        """Record the stays of a finished response, in order, and when it left the last replica."""
        if stays:
            self._stays += stays
            self._unmoved.append(replace(stays[0], tokens=sum(stay.tokens for stay in stays)))
            self._last = max(self._last, at)

    def saved_s(self, step_s: Callable[[int], float]) -> float:
        """Return the seconds that the moves saved; below 0 if they cost time.

        The rollout is replayed twice with measured step times, as it was and without moves. The ratio of the two times
        the actual seconds is the time without moves: both include prefills and pauses, and without moves nothing is
        saved. Arrival times are unchanged.
        """
        replayed_s = makespan_s(self._stays, step_s)
        if replayed_s <= 0:
            return 0.0
        real_s = self._last - min(stay.since for stay in self._stays)
        return real_s * (makespan_s(self._unmoved, step_s) / replayed_s - 1)


class StepTimes:
    """Seconds between two tokens of a request by the decode size of its replica, fitted to stays.

    The tokens of a stay are the sum over tiers of its seconds in the tier times the tier's rate: a linear least-squares
    problem over all stays.
    """

    def __init__(self) -> None:
        self._stays: deque[tuple[int, Mapping[int, float]]] = deque(maxlen=_STAYS)

    def measured(self, *, tokens: int, tier_seconds: Mapping[int, float]) -> None:
        """Note a stay.

        Args:
            tokens: tokens decoded.
            tier_seconds: seconds that the replica spent in each tier meanwhile, per request.
        """
        if tokens > 0 and any(tier_seconds.values()):
            self._stays.append((tokens, tier_seconds))

    def fit(self) -> Mapping[int, float]:
        """Return the seconds of a token by tier; for a tier never seen, the mean."""
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
