"""What all ranks have learned from each other's tables (step times, lengths, costs of moves), and the plan from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from equipoise.rollout.policy.lengths import LengthModel
from equipoise.rollout.policy.requests import Move, Request
from equipoise.rollout.policy.step_time import StepTime
from equipoise.rollout.policy.worth import TransferCost
from equipoise.rollout.transfer.config import RebalancerConfig
from equipoise.rollout.transfer.tables import check_moves, fitting
from equipoise.rollout.transfer.wire import Table

Planner = Callable[..., list[Move]]
"""Anything with the signature of :func:`equipoise.plan_rebalance`."""
_SAMPLES = 512
_ENOUGH = 3
_PREFILLS = 64


class Knowledge:
    """Grows by each check's tables in rank order, so it is the same on every rank and all make the same plan."""

    def __init__(self, config: RebalancerConfig) -> None:
        self.config = config
        self.lengths = LengthModel()
        self.samples: deque[tuple[int, int, float]] = deque(maxlen=_SAMPLES)
        self.moved: tuple[str, ...] = ()
        self._s_per_token: deque[float] = deque(maxlen=16)
        self._moved_tokens = 0
        self._prefills: deque[tuple[int, float]] = deque(maxlen=_PREFILLS)

    def learn(self, tables: Sequence[Table]) -> None:
        """Add what ranks measured since the last check."""
        for table in tables:
            self.samples.extend(table.samples)
            if table.prefilled[0]:
                self._prefills.append(table.prefilled)
            for prompt, length in table.finished:
                self.lengths.finish(prompt, length)
        seconds = max(table.exchange_s for table in tables)
        if seconds and self._moved_tokens:
            self._s_per_token.append(seconds / self._moved_tokens)
            self._moved_tokens = 0

    def note_moves(self, tables: Sequence[Table], moves: Sequence[Move]) -> None:
        """Remember what moved: it should stay for a while, and its seconds come with the next tables."""
        rows = {row.id: row for table in tables for row in table.rows}
        sent, came = [0] * len(tables), [0] * len(tables)
        for move in moves:
            tokens = rows[str(move.request_id)].num_tokens
            sent[move.from_rank] += tokens
            came[move.to_rank] += tokens
        self._moved_tokens = max(sent + came)
        self.moved = tuple(str(move.request_id) for move in moves)

    def plan(self, tables: Sequence[Table], planner: Planner) -> tuple[list[Move], float]:
        """Moves that receivers have room for, and their predicted saving in seconds."""
        requests = self.requests(tables)
        model = self.step_time(requests)
        rate = median(self._s_per_token) if self._s_per_token else 0.0
        with_kv = self.config.transfer == "kv"
        moves = planner(
            requests,
            tiers=self.config.tiers,
            slots=[table.facts.slots for table in tables],
            step_time=model,
            min_gain=self.config.min_gain if model is not None else 0.0,
            kv_capacity=[table.facts.num_blocks * table.facts.layout.block_size for table in tables],
            transfer=TransferCost(
                kv_s_per_token=rate if with_kv else 0.0,
                prefill_s_per_token=0.0 if with_kv else rate + self.prefill_s_per_token,
            ),
            moved_before=self.moved,
        )
        check_moves(tables, moves, transfer=self.config.transfer)
        moves = fitting(tables, moves, transfer=self.config.transfer)
        return moves, self._saving(requests, moves, model)

    @property
    def prefill_s_per_token(self) -> float:
        """Measured seconds to prefill a token; 0 before the first measurement."""
        tokens = sum(tokens for tokens, _ in self._prefills)
        return sum(seconds for _, seconds in self._prefills) / tokens if tokens else 0.0

    def requests(self, tables: Sequence[Table]) -> list[list[Request]]:
        """The planner's view of all ranks."""
        rows = [row for table in tables for row in table.rows]
        expected = iter(self.lengths.expect([row.prompt for row in rows], [row.num_output for row in rows]).tolist())
        return [
            [
                Request(
                    row.id,
                    num_tokens=row.num_tokens,
                    kv_tokens=row.num_cached,
                    running=row.running,
                    expected_remaining=min(float(next(expected)), float(row.max_remaining)),
                )
                for row in table.rows
            ]
            for table in tables
        ]

    def step_time(self, requests: Sequence[Sequence[Request]]) -> StepTime | None:
        """Fitted to all ranks' steps, once the group's tier and the lowest it may reach have been measured.

        Until then, moves are planned by counts, because a tier must run to be measured.
        """
        if not self.config.multi_graph:
            return None
        counts = {tier: sum(sample[0] == tier for sample in self.samples) for tier in self.config.tiers}
        mean = -(-sum(map(len, requests)) // len(requests))
        if any(counts[self.tier(number)] < _ENOUGH for number in (max(map(len, requests)), mean)):
            return None
        kept = [sample for sample in self.samples if counts.get(sample[0], 0) >= _ENOUGH]
        tiers, context, seconds = zip(*kept, strict=True)
        return StepTime.fit(tiers, context, seconds)

    def tier(self, num_requests: int) -> int:
        """Decode tier of a rank with this many requests."""
        return min((tier for tier in self.config.tiers if tier >= num_requests), default=self.config.tiers[0])

    def _saving(self, requests: Sequence[Sequence[Request]], moves: Sequence[Move], model: StepTime | None) -> float:
        """Steps until the fullest rank reaches the tier without moves × the seconds per step that the tier saves."""
        if not moves or model is None:
            return 0.0
        held, after = max(requests, key=len), max(counts_after(requests, moves))
        if after >= len(held):
            return 0.0
        left = sorted(request.expected_remaining or 0.0 for request in held)
        context = float(sum(request.kv_tokens for request in held))
        before_s = model(self.tier(len(held)), context)
        return left[len(held) - after - 1] * (before_s - model(self.tier(after), context * after / len(held)))


def counts_after(held: Sequence[Sequence[object]], moves: Sequence[Move]) -> list[int]:
    """Requests of each rank once these have moved."""
    counts = [len(rows) for rows in held]
    for move in moves:
        counts[move.from_rank] -= 1
        counts[move.to_rank] += 1
    return counts
