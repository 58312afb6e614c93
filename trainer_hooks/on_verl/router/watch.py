"""What the replicas did over time: the metrics under ``equipoise/rollout/``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping


class Watch:
    """Integrals over time, updated whenever a request arrives or leaves.

    Time counts only while some request runs: between two rollouts no replica is idle.

    Args:
        clock: returns the time in seconds.
        tier: decode size of a replica with this many requests.
        share: share of time in which each of this many requests is decoded; below 1 if they take turns.
    """

    def __init__(
        self, clock: Callable[[], float], tier: Callable[[int], int], share: Callable[[int], float] = lambda _: 1.0
    ) -> None:
        self._clock = clock
        self._tier = tier
        self._share = share
        self._last = clock()
        self.request_seconds: dict[str, float] = {}
        self.tier_seconds: dict[str, dict[int, float]] = {}
        self._clear()

    def _clear(self) -> None:
        self._busy_s = self._server_s = self._idle_s = self._spread_s = self._tier_s = 0.0
        self.counts: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    def advance(self, running: Mapping[str, int], load: Mapping[str, float]) -> None:
        """Add the time since the last call, with each replica's requests and outstanding tokens during it."""
        now = self._clock()
        passed, self._last = now - self._last, now
        if passed <= 0 or not any(running.values()):
            return
        self._busy_s += passed
        self._server_s += passed * len(running)
        self._idle_s += passed * sum(not count for count in running.values())
        total = sum(load.values())
        self._spread_s += passed * (max(load.values()) * len(load) / total if total > 0 else 1.0)
        self._tier_s += passed * self._tier(max(running.values()))
        for server, count in running.items():
            if count:
                self.request_seconds[server] = self.request_seconds.get(server, 0.0) + passed * count
                tiers = self.tier_seconds.setdefault(server, {})
                tiers[self._tier(count)] = tiers.get(self._tier(count), 0.0) + passed * self._share(count)

    def asked(self, server: str) -> None:
        """Note that a request went to a replica."""
        self._asked[server] += 1

    def forget(self, servers: Iterable[str]) -> None:
        """Forget replicas that are gone."""
        for server in servers:
            self.request_seconds.pop(server, None)
            self.tier_seconds.pop(server, None)

    def take(self, servers: Iterable[str]) -> dict[str, float]:
        """Return the metrics since the last call; empty if no request arrived or ran."""
        asked = [self._asked[server] for server in servers] or [0]
        counts, busy = self.counts, self._busy_s
        if not busy and not any(asked):
            self._clear()
            return {}
        figures = {
            "requests": float(sum(self._asked.values())),
            "requests_per_replica_max": float(max(asked)),
            "requests_per_replica_min": float(min(asked)),
            "idle_share": self._idle_s / self._server_s if busy else 0.0,
            "outstanding_max_over_mean": self._spread_s / busy if busy else 1.0,
            "tier_mean": self._tier_s / busy if busy else 0.0,
            "busy_seconds": busy,
            "moves_planned": float(counts["planned"]),
            "moves": float(counts["moved"]),
            "moves_refused": float(counts["kept"]),
            "moved_tokens": float(counts["moved_tokens"]),
            "kv_bytes": float(counts["kv_bytes"]),
            "stayed": float(counts["stayed"]),
            "left": float(counts["left"]),
        }
        if counts["judged"]:
            figures["length_error"] = counts["error"] / max(counts["length"], 1)
        self._clear()
        return figures
