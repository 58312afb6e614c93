"""Whether a plan pays: seconds of decoding that it saves, and seconds that it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from equipoise._arrays import FloatArray, IntArray, int_sums, sums
from equipoise._checks import is_amount
from equipoise.errors import InvalidInput, must
from equipoise.rollout.policy.holdings import Holdings

_HALVINGS = 14

StepSeconds = Callable[[int, float], float]
"""Seconds of a decode step from the tier and the KV tokens of the fullest rank, such as `StepTime`."""


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """Seconds = latency + KV tokens of the busiest link × seconds + tokens of the busiest prefill × seconds.

    All ranks wait for the busiest one. Links are full duplex.

    Attributes:
        latency_s: fixed seconds per exchange.
        kv_s_per_token: seconds to send one token's keys and values.
        prefill_s_per_token: seconds to prefill one token of a request that moves without its cache; 0 if caches move.

    >>> cost = TransferCost(latency_s=0.002, kv_s_per_token=3e-6)
    >>> cost.seconds(np.array([2000, 0]), np.array([0, 2000]), np.zeros(2))
    0.008
    """

    latency_s: float = 0.0
    kv_s_per_token: float = 0.0
    prefill_s_per_token: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_amount(value):
                raise InvalidInput(must(field.name, "be finite and at least 0", value, "measure it in seconds"))

    def seconds(self, sent: IntArray, received: IntArray, prefilled: IntArray | FloatArray) -> float:
        """Seconds of an exchange, from the KV tokens that each rank sends and receives and the tokens it prefills."""
        link = max(int(sent.max(initial=0)), int(received.max(initial=0)))
        prefill = float(prefilled.max(initial=0))
        return self.latency_s + link * self.kv_s_per_token + prefill * self.prefill_s_per_token


def exchange_seconds(holdings: Holdings, moving: IntArray, to: IntArray, cost: TransferCost) -> float:
    """Predicted seconds that all ranks wait while these requests move."""
    kv, ranks = holdings.kv_tokens[moving], holdings.num_ranks
    prefilled: IntArray = np.zeros(1, dtype=np.int64)
    if cost.prefill_s_per_token:
        prefilled = int_sums(to, np.where(holdings.running[moving], holdings.num_tokens[moving], 0), ranks)
    return cost.seconds(int_sums(holdings.rank[moving], kv, ranks), int_sums(to, kv, ranks), prefilled)


def saved_seconds(
    holdings: Holdings,
    target: int,
    tiers: IntArray,
    step_time: StepSeconds,
    context: tuple[float, float],
    most_steps: float = float("inf"),
) -> float:
    """Predicted seconds that reaching ``target`` now saves over waiting for requests to finish.

    Σ over the tiers above ``target`` of (steps that ranks would stay in the tier) × (time of the tier - time of
    ``target``). A request of expected remaining length m is assumed to finish within s steps with probability
    1 - exp(-s / m), and the group reaches a tier once every rank's mean count does. The prediction is low: chance
    keeps the fullest rank above its mean, and after the moves the tier would fall further.

    Args:
        holdings: all requests.
        target: the tier that ranks would reach.
        tiers: all tiers, ascending.
        step_time: seconds of a step.
        context: KV tokens of the fullest rank without the moves and after them.
        most_steps: the most steps that any request can still take.
    """
    most = int(holdings.held.max())
    now = int(tiers[np.searchsorted(tiers, most)]) if most <= int(tiers[-1]) else most
    falls = [int(tier) for tier in tiers if target <= tier < now][::-1]
    after, reached, saved = step_time(target, context[1]), 0.0, 0.0
    for tier, next_tier in zip([now, *falls], falls, strict=False):
        until = min(max(_steps_until(holdings, next_tier), reached), most_steps)
        saved += (until - reached) * (step_time(tier, context[0]) - after)
        reached = until
    return saved


def _steps_until(holdings: Holdings, tier: int) -> float:
    """Steps until each rank's mean count falls to ``tier`` without moves: s with Σ exp(-s / m) = ``tier``."""
    over = holdings.held > tier
    if not over.any():
        return 0.0
    mine = over[holdings.rank]
    rank, mean = (np.cumsum(over) - 1)[holdings.rank[mine]], np.maximum(holdings.expected[mine], 1.0)
    low = np.zeros(int(over.sum()))
    high = float(mean.max()) * np.log(holdings.held[over] / tier)  # as if all took as long as the longest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        more = sums(rank, np.exp(-middle[rank] / mean), low.size) > tier
        low, high = np.where(more, middle, low), np.where(more, high, middle)
        last = high > low.max()  # the others reach the tier earlier
        if last.any() and not last.all():
            mine = last[rank]
            rank, mean = (np.cumsum(last) - 1)[rank[mine]], mean[mine]
            low, high = low[last], high[last]
    return float(high.max())


def kept_by_waiting(holdings: Holdings, leaving: IntArray, target: int, steps: int) -> float:
    """KV tokens that moving ``steps`` later is expected to save, because requests finish in the meantime.

    Requests finish as in `saved_seconds`; the excess of a rank is assumed normal around its mean.
    """
    rank = holdings.rank
    crowded = (holdings.held > target)[rank]
    survive = np.exp(-steps / np.maximum(holdings.expected[crowded], 1.0))
    mean = sums(rank[crowded], survive, holdings.num_ranks) - target
    spread = np.sqrt(np.maximum(sums(rank[crowded], survive * (1 - survive), holdings.num_ranks), 1e-12))
    later = np.where(holdings.held > target, _positive_part(mean, spread), 0.0)
    moving = np.bincount(rank[leaving], minlength=holdings.num_ranks)
    tokens = sums(rank[leaving], holdings.kv_tokens[leaving].astype(np.float64), holdings.num_ranks)
    each = tokens / np.maximum(moving, 1)
    return float((tokens - later * (each + steps)).sum())


def _positive_part(mean: FloatArray, spread: FloatArray) -> FloatArray:
    """E max(X, 0) for a normal X, with a logistic approximation of its distribution function (error below 0.01)."""
    z = np.clip(mean / spread, -30.0, 30.0)
    below = 1.0 / (1.0 + np.exp(-1.702 * z))
    return np.asarray(spread * np.exp(-z * z / 2) / np.sqrt(2 * np.pi) + mean * below)
