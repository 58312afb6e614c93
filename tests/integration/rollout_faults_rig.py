"""Ranks of which one fails, at every point where it meets the others in a rollout or on the way there.

Each scenario runs on all ranks, one of which raises once, at the ``after``-th call of one point. What is left undone is
asked for again, of the same rebalancer.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import equipoise as eq
from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import RequestState, StepReport, wire
from equipoise.rollout.transfer.caches import CacheStream
from equipoise.rollout.transfer.channel import OutOfStep, RankLost
from equipoise.rollout.transfer.knowledge import Knowledge
from equipoise.rollout.transfer.rebalancer import RebalancerConfig, RolloutRebalancer
from tests.integration.gloo_ranks import join
from tests.toy_engine import TIERS, ToyEngine, answer, request

TIMEOUT_S = 20.0
SHORT_S = 6.0


class HomeMadeError(Exception):
    """Of a kind that no list of exceptions names."""


ERRORS: tuple[type[Exception], ...] = (AssertionError, KeyError, HomeMadeError)
ENGINE = ("facts", "list_requests", "export", "abort", "reserve", "write", "commit", "step", "take_finished")
OTHERS: dict[str, tuple[Any, str]] = {
    "learn": (Knowledge, "learn"),
    "plan": (Knowledge, "plan"),
    "note": (RolloutRebalancer, "_note"),
    "pack table": (wire, "pack_table"),
    "pack states": (wire, "pack_states"),
    "unpack states": (wire, "unpack_states"),
    "read a layer": (CacheStream, "_pack"),
}
POINTS = (*ENGINE, *OTHERS, "planner", "on_step")
REFUSED = ("export", "reserve", "write", "commit", "read a layer")
"""Nothing moves, and decoding goes on, where these fail in an exchange."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    point: str
    rank: int
    after: int
    error: type[Exception]
    transfer: str

    @property
    def name(self) -> str:
        return f"{self.point}, rank {self.rank}, call {self.after}, {self.error.__name__}, {self.transfer}"


def scenarios(world_size: int) -> list[Scenario]:
    errors = itertools.cycle(ERRORS)
    calls = (0, 1, 2, 5) if world_size == 2 else (0, 3)
    return [
        Scenario(point=point, rank=rank, after=after, error=next(errors), transfer="kv" if after != 1 else "recompute")
        for point in POINTS
        for rank in range(world_size)
        for after in calls
    ]


def asked(rank: int) -> list[RequestState]:
    lengths = [14, 15, 13, 16, 14, 12] if rank == 0 else [3, 8]
    return [request(f"{rank}/{i}", length, seed=10 * rank + i) for i, length in enumerate(lengths)]


def always_moves(requests_by_rank: Sequence[Sequence[eq.Request]], **_: Any) -> list[Move]:
    """The first two running requests of the fullest rank go to the next."""
    full = max(range(len(requests_by_rank)), key=lambda rank: len(requests_by_rank[rank]))
    to = (full + 1) % len(requests_by_rank)
    return [Move(full, to, each.id) for each in requests_by_rank[full] if each.running][:2]


def never_moves(_requests_by_rank: Sequence[Sequence[eq.Request]], **_: Any) -> list[Move]:
    return []


class _Fault:
    """Raises once, at a call of what it is put into."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.calls, self.fired = scenario, 0, False

    def around(self, works: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls > self.scenario.after and not self.fired:
                self.fired = True
                raise self.scenario.error("injected")
            return works(*args, **kwargs)

        return call


def play(rank: int, scenario: Scenario) -> dict[str, Any]:
    """A rollout in which a rank fails, and what it left; then the rest of it, in which none does."""
    fault, mine = _Fault(scenario), rank == scenario.rank
    engine = ToyEngine()
    runner, seen = _fail(engine, fault, asked(rank), mine=mine)
    seen["empty"] = engine.is_empty
    fault.fired = True
    if runner is None:
        runner, again = _fail(engine, fault, [], mine=mine)
        assert runner is not None
        assert not again["text"]
        rest = runner.generate(asked(rank))
        first: list[RequestState] = []
    else:
        first = runner.results
        rest = runner.generate(runner.unfinished) if seen["text"] else []
    return {
        **seen,
        "scenario": scenario.name,
        "point": scenario.point,
        "rank": scenario.rank,
        "fired": mine and fault.calls > scenario.after,
        "refusals": runner.refusals,
        "empty": seen["empty"] and engine.is_empty,
        "right": {each.id: each.output for each in (*first, *rest)} == {each.id: answer(each) for each in asked(rank)},
        "twice": sorted({each.id for each in first} & {each.id for each in rest}),
    }


def _fail(
    engine: Any, fault: _Fault, requests: Sequence[RequestState], *, mine: bool
) -> tuple[RolloutRebalancer | None, dict[str, Any]]:
    """Start a rebalancer and decode; on the rank that is to fail, with the fault in its place."""
    point = fault.scenario.point
    config = RebalancerConfig(
        check_interval=3, tiers=TIERS, timeout_s=TIMEOUT_S, transfer=fault.scenario.transfer, profile_interval=1
    )
    where, name = OTHERS.get(point, (engine if point in ENGINE else None, point))
    works = getattr(where, name, None)
    planner: Any = fault.around(always_moves) if mine and point == "planner" else always_moves
    on_step: Any = fault.around(_watch) if mine and point == "on_step" else None
    if mine and works is not None:
        setattr(where, name, fault.around(works))
    runner, text, start = None, "", time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runner = RolloutRebalancer(engine, None, config, planner=planner)
            runner.generate(requests, on_step=on_step)
        except eq.EquipoiseError as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            if mine and works is not None:
                setattr(where, name, works)
    warned = [str(each.message) for each in caught]
    return runner, {"text": text, "warned": warned, "seconds": time.monotonic() - start}


def _watch(report: StepReport) -> None:
    """Nothing to do at a step."""


def disagree(rank: int) -> dict[str, Any]:
    """Planners that differ from rank to rank."""
    engine = ToyEngine()
    config = RebalancerConfig(check_interval=3, tiers=TIERS, timeout_s=TIMEOUT_S)
    planner: Any = always_moves if rank else never_moves
    runner, start = RolloutRebalancer(engine, None, config, planner=planner), time.monotonic()
    try:
        runner.generate(asked(rank))
    except OutOfStep as error:
        left = len(runner.unfinished) + len(runner.results)
        return {"text": str(error), "seconds": time.monotonic() - start, "empty": engine.is_empty, "left": left}
    return {}


def run(rank: int, folder: str) -> None:
    world_size = 2 if folder.endswith("two") else 3
    join(rank, world_size, folder)
    played = [play(rank, scenario) for scenario in scenarios(world_size)]
    torch.save({"played": played, "disagree": disagree(rank)}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_lost(rank: int, folder: str) -> None:
    """Three ranks; in an exchange rank 1 dies or hangs, and rank 2 comes late."""
    join(rank, 3, folder)
    engine: Any = ToyEngine()
    runner = RolloutRebalancer(
        engine, None, RebalancerConfig(check_interval=5, tiers=TIERS, timeout_s=SHORT_S, transfer="kv"), planner=_late
    )
    mine = [request(f"{rank}/{i}", 40, seed=10 * rank + i) for i in range(8 if rank == 1 else 1)]
    if rank == 1:
        engine.export = _die if folder.endswith("killed") else _hang
    try:
        runner.generate(mine)
    except RankLost as error:
        seen: dict[str, Any] = {"text": str(error), "ranks": error.ranks, "seconds": time.monotonic() - _planned[-1]}
        seen |= {"unfinished": [state.id for state in runner.unfinished], "empty": engine.is_empty}
        try:
            runner.generate(mine)
        except RankLost as again:
            seen["again"] = again.ranks
        torch.save(seen, f"{folder}/{rank}.pt")
    os._exit(0)  # a group that lost a rank cannot be torn down in order


_planned: list[float] = []
"""When this rank went into exchanges."""


def _late(requests_by_rank: Sequence[Sequence[eq.Request]], **_: Any) -> list[Move]:
    if dist.get_rank() == 2:
        time.sleep(SHORT_S / 3)
    _planned.append(time.monotonic())
    return always_moves(requests_by_rank)


def _die(_: Sequence[str]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(_: Sequence[str]) -> None:
    time.sleep(3 * SHORT_S)
    os._exit(0)
