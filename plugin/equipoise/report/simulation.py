"""Ranks that decode in lockstep, simulated from check to check: exact to the step, without a loop over steps."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise._arrays import FloatArray, IntArray, counts, int_sums
from equipoise.report.setting import Responses, Setting

NOT_STARTED = -1
SAMPLE_EVERY = 64
_LONG_STRIDE = 2048


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Unfinished requests at a check, in rank order, by arrival within a rank; arrays of shape (n,).

    Attributes:
        index: index of each in the responses.
        rank: its rank.
        running: whether it decodes.
        generated: tokens so far.
        kv_tokens: prompt and generated tokens; 0 while it waits.
        finished: indices of the finished responses.
        moved: how often each has moved.
    """

    index: IntArray
    rank: IntArray
    running: np.ndarray[tuple[int], np.dtype[np.bool_]]
    generated: IntArray
    kv_tokens: IntArray
    finished: IntArray
    moved: IntArray
    responses: Responses


Policy = Callable[[Snapshot, Setting], tuple[IntArray, IntArray]]
"""Positions in the snapshot of the requests that move, and their new ranks."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a rollout.

    Attributes:
        seconds: from the first step to the end of the longest response, including exchanges.
        exchange_s: seconds of exchanges.
        moves: requests that changed rank.
        kv_bytes: bytes of their caches.
        idle_share: share of decode slots in the graphs without a request, weighted by time.
        plan_ms: processor milliseconds of each check that moved something.
        check_ms: mean processor milliseconds of a check.
        tier: tier of each step.
        active: running requests of each rank at every 64th step, shape (samples, ranks).
        second: start time of each step, shape (steps,).
    """

    seconds: float
    exchange_s: float
    moves: int
    kv_bytes: int
    idle_share: float
    plan_ms: tuple[float, ...]
    check_ms: float
    tier: IntArray
    active: IntArray
    second: FloatArray


class Rollout:
    """The state of one rollout."""

    def __init__(self, responses: Responses, rank: IntArray, setting: Setting) -> None:
        self.responses, self.setting = responses, setting
        self.rank = np.array(rank, dtype=np.int64)
        self.start: IntArray = np.full(rank.size, NOT_STARTED, dtype=np.int64)
        self.arrival = np.arange(rank.size, dtype=np.int64)
        self.moved = np.zeros(rank.size, dtype=np.int64)
        self.open = np.arange(rank.size, dtype=np.int64)
        self.closed: list[IntArray] = []
        self.step = 0
        self.stride = setting.check_interval
        self._admit()

    @property
    def at_rest(self) -> bool:
        """Whether every rank fits into the smallest tier and nothing waits, so that no move can lower the tier."""
        most = int(self._running_of(self.open).max())
        return most <= self.setting.step_time.tiers[0] and self._waiting().size == 0

    @property
    def finish(self) -> IntArray:
        """Last step of each started response."""
        return self.start + self.responses.length

    def advance(self, until: int) -> tuple[IntArray, IntArray]:
        """Decode up to step ``until``; the running requests and KV tokens of each rank, shape (ranks, steps)."""
        self._queue(until)
        width, ranks = until - self.step, self.setting.num_ranks
        mine = self.open[(self.start[self.open] != NOT_STARTED) & (self.start[self.open] < until)]
        row, begin = self.rank[mine] * (width + 1), np.maximum(self.start[mine] - self.step, 0)
        end = np.minimum(self.finish[mine] - self.step, width)
        base = self.responses.prompt_tokens[mine] - self.start[mine]
        size = ranks * (width + 1)
        running = counts(row + begin, size) - counts(row + end, size)
        offset = int_sums(row + begin, base, size) - int_sums(row + end, base, size)
        running = np.cumsum(running.reshape(ranks, -1), axis=1)[:, :-1]
        offset = np.cumsum(offset.reshape(ranks, -1), axis=1)[:, :-1]
        kv_tokens = offset + running * np.arange(self.step, until)
        self.step = until
        done = (self.start[self.open] != NOT_STARTED) & (self.finish[self.open] <= until)
        self.closed.append(self.open[done])
        self.open = self.open[~done]
        return running, kv_tokens

    def snapshot(self) -> Snapshot:
        """The snapshot for a policy."""
        index = self.open[np.lexsort((self.arrival[self.open], self.rank[self.open]))]
        running = self.start[index] != NOT_STARTED
        generated = np.where(running, self.step - self.start[index], 0)
        return Snapshot(
            index=index,
            rank=self.rank[index],
            running=running,
            generated=generated,
            kv_tokens=np.where(running, generated + self.responses.prompt_tokens[index], 0),
            finished=np.concatenate([np.zeros(0, dtype=np.int64), *self.closed]),
            moved=self.moved[index],
            responses=self.responses,
        )

    def move(self, snapshot: Snapshot, leaving: IntArray, to: IntArray) -> float:
        """Carry out the moves; returns the seconds that they take."""
        kv, ranks = snapshot.kv_tokens[leaving], self.setting.num_ranks
        seconds = self.setting.transfer.seconds(
            int_sums(snapshot.rank[leaving], kv, ranks), int_sums(to, kv, ranks), int_sums(to, kv, ranks)
        )
        index = snapshot.index[leaving]
        self.rank[index] = to
        self.moved[index] += 1
        self.arrival[index] = self.arrival.max() + 1 + np.arange(index.size)
        self._admit()
        return seconds

    def _waiting(self) -> IntArray:
        return self.open[self.start[self.open] == NOT_STARTED]

    def _admit(self) -> None:
        """Start waiting requests where a slot is free."""
        waiting = self._waiting()
        if waiting.size == 0:
            return
        free = self.setting.places - self._running_of(self.open)
        order = waiting[np.lexsort((self.arrival[waiting], self.rank[waiting]))]
        ranks = self.rank[order]
        first = np.searchsorted(ranks, ranks)
        self.start[order[np.arange(order.size) - first < free[ranks]]] = self.step

    def _running_of(self, index: IntArray) -> IntArray:
        return counts(self.rank[index[self.start[index] != NOT_STARTED]], self.setting.num_ranks)

    def _queue(self, until: int) -> None:
        """Start waiting requests whenever a slot becomes free before ``until``."""
        waiting = self._waiting()
        if waiting.size == 0:
            return
        running = self.open[self.start[self.open] != NOT_STARTED]
        soon: IntArray = np.unique(self.rank[running[self.finish[running] < until]])
        for rank in np.intersect1d(soon, self.rank[waiting]).tolist():
            ends = self.finish[running[self.rank[running] == rank]].tolist()
            heapq.heapify(ends)
            queue = waiting[self.rank[waiting] == rank]
            for index in queue[np.argsort(self.arrival[queue])].tolist():
                if ends[0] >= until:
                    break
                self.start[index] = heapq.heappop(ends)
                heapq.heappush(ends, int(self.start[index] + self.responses.length[index]))


def simulate(
    responses: Responses, rank: IntArray, setting: Setting, policy: Policy | None, *, one_shape: bool = False
) -> Outcome:
    """Decode all responses.

    Args:
        responses: the responses to generate.
        rank: initial rank of each, shape (n,).
        setting: the cluster.
        policy: called at each check; None for no moves.
        one_shape: every step costs the largest tier.
    """
    rollout = Rollout(responses, rank, setting)
    rollout.stride = setting.check_interval if policy is not None else _LONG_STRIDE
    tiers = np.array(setting.step_time.tiers)
    seconds = exchange = used = computed = 0.0
    moves = kv_bytes = 0
    plan_ms: list[float] = []
    check_s, num_checks = 0.0, 0
    found_tiers: list[IntArray] = []
    active: list[IntArray] = []
    begins: list[FloatArray] = []
    while rollout.open.size:
        first = -rollout.step % SAMPLE_EVERY
        running, kv_tokens = rollout.advance(_next_stop(rollout))
        live = int(np.count_nonzero(running.any(axis=0)))  # the last piece ends with its last response
        running, kv_tokens = running[:, :live], kv_tokens[:, :live]
        most = running.max(axis=0)
        index = np.asarray(np.searchsorted(tiers, most), dtype=np.int64)
        if one_shape:
            index[:] = tiers.size - 1
        step_s: FloatArray = setting.step_time.of_tiers(index, kv_tokens.max(axis=0).astype(np.float64))
        begins.append(seconds + np.cumsum(step_s) - step_s)
        seconds += float(step_s.sum())
        used += float((running.sum(axis=0) * step_s).sum())
        computed += float((tiers[index] * step_s).sum()) * setting.num_ranks
        found_tiers.append(np.asarray(tiers[index], dtype=np.int64))
        active.append(np.asarray(running[:, first::SAMPLE_EVERY].T, dtype=np.int64))
        if not rollout.open.size:
            continue
        if policy is None or rollout.at_rest:
            rollout.stride = _LONG_STRIDE
            continue
        snapshot = rollout.snapshot()
        before = time.process_time()
        leaving, to = policy(snapshot, setting)
        spent = time.process_time() - before
        check_s, num_checks = check_s + spent, num_checks + 1
        if leaving.size:
            took = rollout.move(snapshot, leaving, to)
            seconds, exchange = seconds + took, exchange + took
            moves += leaving.size
            kv_bytes += 0 if setting.recompute else int(snapshot.kv_tokens[leaving].sum()) * setting.kv_bytes_per_token
            plan_ms.append(spent * 1e3)
    return Outcome(
        seconds=seconds,
        exchange_s=exchange,
        moves=moves,
        kv_bytes=kv_bytes,
        idle_share=1.0 - used / computed,
        plan_ms=tuple(plan_ms),
        check_ms=check_s * 1e3 / max(num_checks, 1),
        tier=np.concatenate(found_tiers),
        active=np.concatenate(active),
        second=np.concatenate(begins),
    )


def _next_stop(rollout: Rollout) -> int:
    """The step of the next check, or of the last response if all have started and none lasts until then."""
    check = rollout.step + rollout.stride
    started = rollout.start[rollout.open]
    if (started == NOT_STARTED).any():
        return check
    return min(check, int(rollout.finish[rollout.open].max()))
