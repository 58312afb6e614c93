"""Decode on all ranks of a group, and move requests at checks, which all ranks reach at the same step.

::

    rebalancer = RolloutRebalancer(DecodeEngine(model), group, RebalancerConfig(check_interval=100))
    results = rebalancer.generate(requests)  # each rank passes its own; results are in their order

"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from equipoise._checks import of_kind
from equipoise.errors import EquipoiseError, EquipoiseWarning, InvalidInput, must
from equipoise.rollout.policy.moves import plan_rebalance
from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import wire
from equipoise.rollout.transfer.caches import take_in
from equipoise.rollout.transfer.channel import Channel
from equipoise.rollout.transfer.config import Check as Check
from equipoise.rollout.transfer.config import RebalancerConfig as RebalancerConfig
from equipoise.rollout.transfer.exchange import Exchanged, PlanFailed, exchange
from equipoise.rollout.transfer.knowledge import Knowledge, Planner, counts_after
from equipoise.rollout.transfer.state import RequestState, SteppingEngine, StepReport
from equipoise.rollout.transfer.tables import gather_tables
from equipoise.rollout.transfer.wire import Row, Table
from equipoise.together import Attempt, attempt

OnStep = Callable[[StepReport], None]


class RolloutRebalancer:
    """Drives an engine and moves its requests; creating one is a collective call.

    Args:
        engine: this rank's engine, with the tiers of ``config``.
        group: process group; None for the default one.
        config: the same on all ranks.
        planner: chooses the moves; called like :func:`equipoise.plan_rebalance`.

    Raises:
        InvalidInput: the tiers are not the engine's.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        group: Any = None,
        config: RebalancerConfig | None = None,
        *,
        planner: Planner = plan_rebalance,
    ) -> None:
        self.engine = engine
        self.config = config or RebalancerConfig()
        self.channel = Channel(group, timeout_s=self.config.timeout_s)
        self.channel.together(self._check_tiers, "starting a rebalancer")
        self.planner = planner
        self.checks: list[Check] = []
        self.refusals: list[str] = []
        self._settings = zlib.crc32(repr(sorted(asdict(self.config).items())).encode())
        self.known = Knowledge(self.config)
        self._new_samples: list[tuple[int, int, float]] = []
        self._ended: list[tuple[int, int]] = []
        self._exchange_s = 0.0
        self._prefilled_tokens, self._prefill_s = 0, 0.0
        self._steps = self._step_count = self._num_checks = 0
        self._busy_s = self._total_s = self._part_s = 0.0
        self._asked: dict[str, RequestState] = {}
        self._done: dict[str, RequestState] = {}
        self._finished: list[RequestState] = []

    def _check_tiers(self) -> None:
        tiers = self.engine.facts().tiers
        if tiers != self.config.tiers:
            raise InvalidInput(
                must("tiers", f"be those of the engine, {tiers}", self.config.tiers, "give both the same")
            )

    @property
    def unfinished(self) -> list[RequestState]:
        """Requests of the last :meth:`generate` without a result, as submitted.

        Submit them again after an error: results depend only on the request, so a second run returns the same.
        :attr:`results` holds the others.
        """
        return [state for name, state in self._asked.items() if name not in self._done]

    @property
    def results(self) -> list[RequestState]:
        """Results of the last :meth:`generate`, in the order of its requests; incomplete after an error."""
        return [self._done[name] for name in self._asked if name in self._done]

    def generate(self, requests: Sequence[RequestState], *, on_step: OnStep | None = None) -> list[RequestState]:
        """Decode the requests of all ranks until they finish; a collective call.

        Args:
            requests: this rank's requests; ids must be unique over all ranks.
            on_step: called after each decode step of this rank.

        Returns:
            Finished requests, in the order of ``requests``, wherever they were decoded.

        Raises:
            InvalidInput: raised on all ranks, before anything is decoded or moved.
            RankLost: a rank did not answer; submit :attr:`unfinished` again.
            EquipoiseError: a rank failed; the error names it. Submit :attr:`unfinished` again.
        """
        start = time.perf_counter()
        self._asked, self._done, self._finished = {}, {}, []
        self._num_checks = 0
        complete = False
        try:
            self._run(requests, on_step)
            complete = True
        finally:
            if not complete:
                self._give_up()
        self._total_s += time.perf_counter() - start
        return self.results

    def _run(self, requests: Sequence[RequestState], on_step: OnStep | None) -> None:
        """Anything that may fail on one rank runs in the part of the next meeting, which votes on it."""
        part, doing = partial(self._take, requests), "taking up requests"
        while True:
            start = time.perf_counter()
            tables = gather_tables(self.channel, partial(self._told, part), doing)
            waited = time.perf_counter() - start - self._part_s
            if not any(found.rows for found in tables):
                break
            plan = attempt(partial(self._plan, tables))
            part, doing = partial(self._go_on, tables, plan, self._move(tables, plan), waited, on_step), "decoding"
        self._bring_home(tables)

    def _give_up(self) -> None:
        """Clean up: no request stays in the engine, and no knowledge that other ranks may lack."""
        self._done |= {state.id: state for state in self._finished if state.home == self.channel.rank}
        self.known = Knowledge(self.config)
        self._new_samples, self._ended, self._steps = [], [], 0
        cleared = attempt(self.engine.clear)
        if cleared.failure is not None:
            text = f"the engine may still hold requests: clearing it failed, {cleared.failure!r}"
            warnings.warn(text, EquipoiseWarning, stacklevel=3)

    def _told(self, part: Callable[[], None]) -> Table:
        """Run a part, then return this rank's table."""
        start = time.perf_counter()
        part()
        table = self.table()
        self._part_s = time.perf_counter() - start
        return table

    def _take(self, requests: Sequence[RequestState]) -> None:
        for index, state in enumerate(requests):
            of_kind(f"requests[{index}]", state, RequestState, "pass equipoise.RequestState(...)")
        self._asked = {state.id: state for state in requests}
        rank = self.channel.rank
        take_in(self.engine, [replace(state, home=rank, index=index) for index, state in enumerate(requests)])

    def _plan(self, tables: Sequence[Table]) -> tuple[list[Move], float]:
        self.known.learn(tables)
        return self.known.plan(tables, self.planner) if self.config.transfer != "none" else ([], 0.0)

    def _move(self, tables: Sequence[Table], plan: Attempt[tuple[list[Move], float]]) -> Exchanged:
        """Carry out a plan. A rank without one moves nothing, and the next meeting reports why."""
        if plan.failure is not None:
            return Exchanged()
        return exchange(self.engine, self.channel, tables, plan.get()[0], transfer=self.config.transfer)

    def _go_on(
        self,
        tables: Sequence[Table],
        plan: Attempt[tuple[list[Move], float]],
        done: Exchanged,
        waited: float,
        on_step: OnStep | None,
    ) -> None:
        if plan.failure is not None:
            raise PlanFailed(f"planning failed: {type(plan.failure).__name__}: {plan.failure}") from plan.failure
        moves, predicted = plan.get()
        if done.refused:
            self.refusals.append(done.refused)
            warnings.warn(f"nothing moved at step {self._steps}: {done.refused}", EquipoiseWarning, stacklevel=2)
        self._note(tables, moves, done, predicted if done.num_moved else 0.0, waited)
        self._decode(on_step)

    def _decode(self, on_step: OnStep | None) -> None:
        """Steps up to the next check, or until this rank has nothing to do."""
        for _ in range(self.config.check_interval):
            start = time.perf_counter()
            report = self.engine.step()
            self._busy_s += time.perf_counter() - start
            if report is None:
                break
            self._step_count += 1
            self._prefilled_tokens += report.prefilled_tokens
            self._prefill_s += report.prefill_seconds
            if self.config.profile and self._step_count % self.config.profile_interval == 0:
                self._new_samples.append((report.tier, report.context_tokens, report.seconds))
            for state in self.engine.take_finished():
                self._finished.append(state)
                self._ended.append((_checksum(state.prompt), len(state.output)))
            if on_step is not None:
                on_step(report)
        self._steps += self.config.check_interval

    def table(self) -> Table:
        """The table of this rank for a check; measurements are sent once."""
        rows = [
            Row(
                id=state.id,
                home=state.home,
                prompt=_checksum(state.prompt),
                num_tokens=state.num_tokens,
                num_output=len(state.output),
                num_cached=state.num_cached,
                running=state.num_cached > 0,
                max_remaining=state.sampling.max_tokens - len(state.output),
            )
            for state in self.engine.list_requests()
        ]
        table = Table(
            facts=self.engine.facts(),
            check=self._num_checks,
            settings=self._settings,
            rows=tuple(rows),
            samples=tuple(self._new_samples),
            finished=tuple(self._ended),
            exchange_s=self._exchange_s,
            prefilled=(self._prefilled_tokens, self._prefill_s),
        )
        self._num_checks += 1
        self._new_samples, self._ended, self._exchange_s = [], [], 0.0
        self._prefilled_tokens, self._prefill_s = 0, 0.0
        return table

    def _note(
        self, tables: Sequence[Table], moves: Sequence[Move], done: Exchanged, predicted: float, waited: float
    ) -> None:
        if done.num_moved:
            self.known.note_moves(tables, moves)
            self._exchange_s = done.seconds
        held = [len(table.rows) for table in tables]
        homes = np.bincount([row.home for table in tables for row in table.rows], minlength=len(tables))
        running = tuple(sum(row.running for row in table.rows) for table in tables)
        self.checks.append(
            Check(
                step=self._steps,
                running=running,
                waiting=tuple(count - num for count, num in zip(held, running, strict=True)),
                tier=self.known.tier(
                    max(counts_after([table.rows for table in tables], moves if done.num_moved else ()))
                ),
                tier_unmoved=self.known.tier(int(homes.max())),
                num_moved=done.num_moved,
                kv_bytes=done.kv_bytes,
                predicted_s=predicted,
                seconds=done.seconds,
                waited_s=waited,
            )
        )

    def _bring_home(self, tables: Sequence[Table]) -> None:
        """Send results to the ranks that asked for them."""

        def pack() -> list[bytes]:
            self.known.learn(tables)
            self.known.lengths.next_rollout()
            by_home = [[state for state in self._finished if state.home == rank] for rank in range(world)]
            return [wire.pack_states(states) if states else b"" for states in by_home]

        def unpack() -> None:
            done = {state.id: state for message in raw if message for state in wire.unpack_states(message)}
            if set(done) != set(self._asked):
                names = sorted(set(done) ^ set(self._asked))
                raise EquipoiseError(f"results are missing or unexpected: {names}; please file a bug")
            self._done = done

        world = self.channel.world_size
        raw = self.channel.scatter(pack, "bringing results home")
        self.channel.together(unpack, "taking results in")

    def metrics(self, prefix: str = "rollout/") -> dict[str, float]:
        """Metrics of all checks so far, for a tracker; seconds are this rank's.

        ``saved_measured_s`` sums, over intervals between checks, the difference in median step time between the tier
        without moves and the actual tier, minus the time of the exchanges.
        """
        times = {
            tier: median(seconds for at, _, seconds in self.known.samples if at == tier)
            for tier in {sample[0] for sample in self.known.samples}
        }
        saved = -sum(check.seconds for check in self.checks)
        for check in self.checks:
            if check.tier in times and check.tier_unmoved in times:
                saved += self.config.check_interval * (times[check.tier_unmoved] - times[check.tier])
        checks = max(1, len(self.checks))
        figures = {
            "checks": float(len(self.checks)),
            "moves": float(sum(check.num_moved for check in self.checks)),
            "refusals": float(len(self.refusals)),
            "kv_bytes": float(sum(check.kv_bytes for check in self.checks)),
            "exchange_s": sum(check.seconds for check in self.checks),
            "saved_predicted_s": sum(check.predicted_s for check in self.checks),
            "saved_measured_s": saved,
            "idle_share": 1 - self._busy_s / self._total_s if self._total_s else 0.0,
            "tier_mean": sum(check.tier for check in self.checks) / checks,
            "tier_unmoved_mean": sum(check.tier_unmoved for check in self.checks) / checks,
        }
        return {f"{prefix}{name}": value for name, value in figures.items()}


def _checksum(prompt: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt, dtype=np.int32).tobytes())
