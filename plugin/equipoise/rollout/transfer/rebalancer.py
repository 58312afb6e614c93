"""Decode on all ranks of a group, and move requests between them at checks that fall on the same step everywhere.

::

    rebalancer = RolloutRebalancer(DecodeEngine(model), group, RebalancerConfig(check_interval=100))
    results = rebalancer.generate(requests)  # on each rank its own; results in the order asked for

"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import numpy as np

from equipoise._checks import of_kind
from equipoise.errors import EquipoiseError, EquipoiseWarning, InvalidInput, must
from equipoise.rollout.policy.moves import plan_rebalance
from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import wire
from equipoise.rollout.transfer.channel import Channel
from equipoise.rollout.transfer.config import Check as Check
from equipoise.rollout.transfer.config import RebalancerConfig as RebalancerConfig
from equipoise.rollout.transfer.exchange import Exchanged, exchange, gather_tables
from equipoise.rollout.transfer.knowledge import Knowledge, Planner, counts_after
from equipoise.rollout.transfer.state import RequestState, SteppingEngine, StepReport
from equipoise.rollout.transfer.wire import Row, Table

_TOLD = (
    EquipoiseError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a rank tells the others of before it raises."""
OnStep = Callable[[StepReport], None]


class RolloutRebalancer:
    """Drives an engine, and moves its requests; a collective call to make.

    Args:
        engine: of this rank, with the tiers of ``config``.
        group: process group; the default one if None.
        config: the same on all ranks.
        planner: says what moves; called like :func:`equipoise.plan_rebalance`.

    Raises:
        InvalidInput: tiers that are not those of the engine.
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
        if self.engine.facts().tiers != self.config.tiers:
            rule = f"be those of the engine, {self.engine.facts().tiers}"
            raise InvalidInput(must("tiers", rule, self.config.tiers, "give both the same"))
        self.channel = Channel(group, timeout_s=self.config.timeout_s)
        self.planner = planner
        self.checks: list[Check] = []
        self.refusals: list[tuple[int, str]] = []
        self._settings = zlib.crc32(repr(sorted(asdict(self.config).items())).encode())
        self.known = Knowledge(self.config)
        self._new_samples: list[tuple[int, int, float]] = []
        self._ended: list[tuple[int, int]] = []
        self._exchange_s = 0.0
        self._prefilled_tokens, self._prefill_s = 0, 0.0
        self._steps = self._step_count = 0
        self._busy_s = self._total_s = 0.0
        self._asked: dict[str, RequestState] = {}
        self._done: dict[str, RequestState] = {}
        self._finished: list[RequestState] = []

    @property
    def unfinished(self) -> list[RequestState]:
        """Requests of the last :meth:`generate` whose results are not back, as they were asked for.

        After an error these are what is to be asked for again: results are by request, so a second run gives the same.
        """
        return [state for name, state in self._asked.items() if name not in self._done]

    def generate(self, requests: Sequence[RequestState], *, on_step: OnStep | None = None) -> list[RequestState]:
        """Decode the requests of all ranks to their ends; a collective call.

        Args:
            requests: of this rank; ids are unique over all ranks.
            on_step: called after each decode step of this rank.

        Returns:
            Finished requests, in the order of ``requests``, wherever they were decoded.

        Raises:
            InvalidInput: on all ranks alike, before anything is decoded or moved.
            RankLost: a rank did not answer; :attr:`unfinished` holds what to ask for again.
            EquipoiseError: a rank failed, named by the error.
        """
        start = time.perf_counter()
        self._asked, self._done = {}, {}
        self._finished = []
        try:
            trouble = _attempt(lambda: self._take(requests))
            while self.check(trouble):
                trouble = _attempt(lambda: self._decode(on_step))
            self._bring_home()
        except EquipoiseError:
            self._done |= {state.id: state for state in self._finished if state.home == self.channel.rank}
            self.engine.abort([state.id for state in self.engine.list_requests()])
            raise
        self.known.lengths.next_rollout()
        self._total_s += time.perf_counter() - start
        return [self._done[name] for name in self._asked]

    def _take(self, requests: Sequence[RequestState]) -> None:
        for index, state in enumerate(requests):
            of_kind(f"requests[{index}]", state, RequestState, "pass equipoise.RequestState(...)")
        self._asked = {state.id: state for state in requests}
        rank = self.channel.rank
        self.engine.import_([replace(state, home=rank, index=index) for index, state in enumerate(requests)])

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

    def check(self, trouble: str = "") -> bool:
        """Meet, plan, and move; False once no rank has unfinished requests. A collective call.

        Args:
            trouble: why this rank cannot go on; all ranks then raise.
        """
        start = time.perf_counter()
        table = self.table(trouble)
        tables = gather_tables(self.channel, table)
        waited = time.perf_counter() - start
        self.known.learn(tables)
        if not any(found.rows for found in tables):
            return False
        moves, predicted, done = [], 0.0, Exchanged()
        if self.config.transfer != "none":
            moves, predicted = self.known.plan(tables, self.planner)
            done = exchange(self.engine, self.channel, tables, moves, transfer=self.config.transfer)
        for rank, reason in done.refused:
            self.refusals.append((rank, reason))
            text = f"nothing moved at step {self._steps}: rank {rank} refused ({reason})"
            warnings.warn(text, EquipoiseWarning, stacklevel=2)
        self._note(tables, moves, done, predicted if done.num_moved else 0.0, waited)
        return True

    def table(self, trouble: str = "") -> Table:
        """What this rank tells the others at a check; measurements are told once."""
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
            check=len(self.checks),
            settings=self._settings,
            rows=tuple(rows),
            trouble=trouble,
            samples=tuple(self._new_samples),
            finished=tuple(self._ended),
            exchange_s=self._exchange_s,
            prefilled=(self._prefilled_tokens, self._prefill_s),
        )
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

    def _bring_home(self) -> None:
        """Send results to the ranks that asked for them."""
        world = self.channel.world_size
        packed = [wire.pack_states([state for state in self._finished if state.home == rank]) for rank in range(world)]
        for raw in self.channel.scatter(packed, "bringing results home"):
            for state in wire.unpack_states(raw):
                if state.id not in self._asked or state.id in self._done:
                    rule = "come home once, to the rank that asked for it"
                    raise EquipoiseError(must(f"result of request {state.id!r}", rule, state.home, "report a defect"))
                self._done[state.id] = state
        if self.unfinished:
            names = [state.id for state in self.unfinished]
            raise EquipoiseError(must("results", "come back for all requests", f"none for {names}", "report a defect"))

    def metrics(self, prefix: str = "rollout/") -> dict[str, float]:
        """Figures of all checks so far, for a tracker; seconds are those of this rank.

        ``saved_measured_s`` compares, interval by interval, the median measured step time of the tier that the group
        would have had without moves with that of the tier it had, less the time of the exchanges.
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


def _attempt(call: Callable[[], Any]) -> str:
    """Why ``call`` failed, or nothing: the others hear of it at the next check instead of waiting for this rank."""
    try:
        call()
    except _TOLD as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _checksum(prompt: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt, dtype=np.int32).tobytes())
