"""Which unfinished requests move from a crowded replica to an idle one, and how long a decode step takes there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from statistics import median

from equipoise.config import RolloutConfig
from equipoise.rollout.policy.moves import VICTIMS, plan_rebalance
from equipoise.rollout.policy.requests import Move, Request
from equipoise.rollout.policy.step_time import StepTime
from equipoise.trainer_hooks.on_verl.router.ledger import Held

_ENOUGH = 3  # measured requests needed to know the time of a tier
_SAMPLES = 256  # most recent requests whose times are kept
_HYSTERESIS = 0.1  # share of the remaining time that a plan must save: expected lengths are no more precise


class MovePlanner:
    """Plans with :func:`equipoise.rollout.policy.moves.plan_rebalance`, from what a router sees.

    A router sees requests arrive and leave, not decode steps. A request's seconds per token stand for the time of a
    step, in the tier of the mean number of requests beside it.

    Replicas do not decode in lockstep, so the goal is that the last of them finishes early. With ``profile`` and
    ``multi_graph`` a plan is executed if it is predicted to save more than a tenth of the remaining time, plus
    ``min_gain``, plus the time that a moving request spends on no replica; without, whenever the fullest replica then
    fits a smaller tier.

    Args:
        config: tiers, and the minimum gain of a move.
        slots: requests that a replica decodes at once; later ones wait.
    """

    most_moves = 2
    """Maximum moves of a request per turn: each costs a prefill."""

    def __init__(self, config: RolloutConfig, *, slots: int) -> None:
        self.config = config
        self.slots = slots
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)
        self._gaps: deque[float] = deque(maxlen=_SAMPLES)
        self._seen = 0
        self.predicted_s = 0.0

    def tier(self, num_requests: int) -> int:
        """Return the decode size of a replica with this many requests."""
        return min((tier for tier in self.config.tiers if tier >= num_requests), default=self.config.tiers[0])

    def measured(self, *, tokens: int, seconds: float, beside: float) -> None:
        """Note a stay: tokens decoded, seconds on the replica, mean number of requests there."""
        if tokens > 0 and seconds > 0:
            self._seen += 1
            if (self._seen - 1) % self.config.profile_interval == 0:
                self._samples.append((self.tier(max(1, round(beside))), seconds / tokens))

    def gap(self, seconds: float) -> None:
        """Note how long a moving request was on no replica."""
        self._gaps.append(seconds)

    @property
    def step_s(self) -> float | None:
        """Median seconds of a decode step; None until a request has finished."""
        return median(seconds for _, seconds in self._samples) if self._samples else None

    def step_time(self, counts: Sequence[int]) -> StepTime:
        """Return the seconds of a step by tier.

        Until both the fullest replica's tier and that of an even spread have been measured, a step in the largest tier
        is assumed to take twice as long as an empty one.
        """
        number = Counter(tier for tier, _ in self._samples)
        mean = -(-sum(counts) // len(counts))
        if any(number[self.tier(count)] < _ENOUGH for count in (max(counts), mean)):
            rising = sorted(self.config.tiers)
            base_s = (self.step_s or 1.0) / 1.5
            times = tuple(base_s * (1 + tier / rising[-1]) for tier in rising)
            return StepTime(tiers=tuple(rising), base_s=times, s_per_token=(0.0,) * len(rising))
        kept = [sample for sample in self._samples if number[sample[0]] >= _ENOUGH]
        return StepTime.fit([tier for tier, _ in kept], [0] * len(kept), [seconds for _, seconds in kept])

    def share(self, count: int) -> float:
        """Return the share of time in which each of ``count`` requests is decoded: beyond the slots they take turns."""
        return min(1.0, self.slots / count)

    def drain_s(self, expected: Sequence[float], step_time: StepTime) -> float:
        """Predict the seconds until a replica with these requests is empty, if no more arrive.

        Until the next one finishes, all that are left decode one token per step; beyond the slots they take turns.
        """
        seconds, before = 0.0, 0.0
        for done, left in enumerate(sorted(expected)):
            count = len(expected) - done
            seconds += (left - before) * step_time(self.tier(min(count, self.slots)), 0) / self.share(count)
            before = left
        return seconds

    def plan(
        self, requests: Mapping[str, Sequence[Held]], generated: Mapping[int, int], moves: Mapping[int, int]
    ) -> list[tuple[Held, str]]:
        """Plan moves between replicas.

        Args:
            requests: the requests of each replica, in order of arrival.
            generated: estimated tokens that each request has generated, by its ``order``.
            moves: how often each request has moved in this turn, by its ``order``.

        Returns:
            Pairs of a request and the replica that it goes to.
        """
        counts = [len(held) for held in requests.values()]
        if len(counts) < 2 or max(counts) <= min(self.config.tiers[-1], self.slots):
            return []
        plans = [self._one_plan(requests, generated, moves, victims) for victims in VICTIMS]
        if not (self.config.multi_graph and self.config.profile):
            return plans[0]
        model = self.step_time(counts)
        now_s = self._last_done_s(requests, [], model)
        gains = [now_s - self._last_done_s(requests, plan, model) for plan in plans]
        best = gains.index(max(gains))
        least = self.config.min_gain + _HYSTERESIS * now_s + (median(self._gaps) if self._gaps else 0.0)
        if gains[best] <= least:
            return []
        self.predicted_s += gains[best]
        return plans[best]

    def _one_plan(
        self,
        requests: Mapping[str, Sequence[Held]],
        generated: Mapping[int, int],
        moves: Mapping[int, int],
        victims: str,
    ) -> list[tuple[Held, str]]:
        found: list[Move] = plan_rebalance(
            [self._ranked(held, generated) for held in requests.values()],
            tiers=self.config.tiers,
            slots=self.slots,
            victims=victims,
            moved_before={order for order, number in moves.items() if number},
        )
        names = list(requests)
        by_order: dict[Hashable, Held] = {held.order: held for each in requests.values() for held in each}
        pairs = [(by_order[move.request_id], names[move.to_rank]) for move in found]
        return [
            (held, to)
            for held, to in pairs
            if moves.get(held.order, 0) < self.most_moves and held.server_request_id is not None
        ]

    def _last_done_s(
        self, requests: Mapping[str, Sequence[Held]], plan: Sequence[tuple[Held, str]], model: StepTime
    ) -> float:
        """Predicted seconds until the last replica has finished; the prefill of moved requests is left out."""
        left = {server: {each.order: each.expected for each in held} for server, held in requests.items()}
        for held, to in plan:
            left[to][held.order] = left[held.server].pop(held.order)
        return max(self.drain_s(list(each.values()), model) for each in left.values())

    def _ranked(self, held: Sequence[Held], generated: Mapping[int, int]) -> list[Request]:
        # the prompt includes what a request had generated when it arrived
        tokens = [each.prompt_tokens + generated[each.order] - each.generated for each in held]
        return [
            Request(
                each.order,
                num_tokens=size,
                kv_tokens=size if place < self.slots else 0,
                running=place < self.slots,
                expected_remaining=each.expected,
            )
            for place, (each, size) in enumerate(zip(held, tokens, strict=True))
        ]
