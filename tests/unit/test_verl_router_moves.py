"""Which requests the router of verl's rollout servers moves, and what it says that saved."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.trainer_hooks.on_verl.router.actor import TokenAwareRouter
from equipoise.trainer_hooks.on_verl.router.replay import Stay, StepTimes, makespan_s
from tests.unit.router_sim import Clock, Replica, answer, ask, draw, prompt_of, rollout, routed


def crowded(**config: Any) -> tuple[TokenAwareRouter, Clock, list[str]]:
    """Six requests of long responses on s0, none on s1 any more, and a decode step of 10 ms."""
    clock = Clock()
    router = routed(2, clock, transfer="recompute", tiers=[8, 4, 2, 1], check_interval=5, **config)
    for i in range(4):
        server = ask(router, f"known {i}", 100)
        clock.now += 4.0
        answer(router, f"known {i}", server, 400)
    at = {f"r{i}": ask(router, f"r{i}", i) for i in range(12)}
    for request, server in at.items():
        if server == "s1":
            router.release_server(server, request)
            router.report(request, 0, aborted=False)
    router.take_metrics()
    return router, clock, [request for request, server in at.items() if server == "s0"]


def told(router: TokenAwareRouter, server: str = "s0") -> list[str]:
    return router._servers[server].told_to_go  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("max_prompts", [65536, 1])
def test_requests_move_from_the_crowded_replica_to_the_idle_one(max_prompts: int) -> None:
    router, clock, requests = crowded(max_prompts=max_prompts)
    clock.now += 1.0
    wait_s = router.check()
    assert wait_s == pytest.approx(0.05)  # five steps
    leaving = list(told(router))
    assert len(leaving) == 2  # no fewer fit the tier of 4
    assert set(leaving) < set(requests)
    clock.now += 0.01
    for request in leaving:
        router.release_server("s0", request)
    for request in leaving:
        assert router.report(request, 90, aborted=True)
        assert ask(router, request, [*prompt_of(0), *[0] * 90]) == "s1"
    assert router.get_status()["servers"] == {"s0": 4, "s1": 2}
    clock.now += 1.0
    router.check()
    assert told(router) == leaving  # nothing more to gain
    for request in requests:
        answer(router, request, "s1" if request in leaving else "s0", 300)
    figures = router.take_metrics()
    assert figures["equipoise/rollout/moves"] == figures["equipoise/rollout/moves_planned"] == 2
    assert figures["equipoise/rollout/moved_tokens"] == 2 * (len(prompt_of(0)) + 90)
    assert figures["equipoise/rollout/predicted_saved_seconds"] > 0
    assert 0 < figures["equipoise/rollout/idle_share"] < 0.5  # s1 was idle half of the time before the move
    assert router.get_status()["outstanding_tokens"] == {"s0": 0, "s1": 0}


@pytest.mark.parametrize("config", [{"min_gain": 1e4}, {"transfer": "none"}, {"tiers": [8]}])
def test_nothing_moves_where_it_does_not_pay(config: dict[str, Any]) -> None:
    router, clock, _ = crowded_with(config)
    for _ in range(3):
        clock.now += 1.0
        router.check()
    assert told(router) == []


def crowded_with(config: dict[str, Any]) -> tuple[TokenAwareRouter, Clock, list[str]]:
    router, clock, requests = crowded()
    settings = {"tiers": [8, 4, 2, 1], "check_interval": 5, **config}
    changed = TokenAwareRouter(router._servers, {"response_length": 1000, **settings}, clock=clock)  # pyright: ignore[reportPrivateUsage]
    for name in ("_ledger", "_conversations", "_lengths", "_watch"):
        setattr(changed, name, getattr(router, name))
    changed._planner.measured(tokens=400, seconds=4.0, beside=1)  # pyright: ignore[reportPrivateUsage]
    return changed, clock, requests


def test_a_replica_that_keeps_its_requests_is_not_asked_again() -> None:
    router, clock, requests = crowded()
    clock.now += 1.0
    router.check()
    leaving = list(told(router))
    for _ in range(60):
        clock.now += 0.1
        router.check()
    assert max(Counter(told(router)).values()) == 1  # others are, once
    assert set(leaving) < set(told(router)) <= set(requests)
    assert router.take_metrics()["equipoise/rollout/moves_refused"] >= 2
    assert router.get_status()["servers"] == {"s0": 6, "s1": 0}
    for request in leaving:  # they let go after all: the response would be cut off, so it is asked for again
        router.release_server("s0", request)
        assert router.report(request, 5, aborted=True)


def test_an_aborted_request_whose_new_replica_is_gone_is_asked_for_again() -> None:
    router, clock, _ = crowded()
    clock.now += 1.0
    router.check()
    request = told(router)[0]
    router.remove_servers(["s1"])
    router.release_server("s0", request)
    assert router.report(request, 5, aborted=True)
    assert ask(router, request, [1] * 60) == "s0"
    router.release_server("s0", request)
    assert not router.report(request, 5, aborted=True)  # verl's own abort: verl decides


def stepped_makespan_s(stays: list[Stay], step_s: Any, *, tick: float = 1e-3) -> float:
    """The same by small ticks of time."""
    left = {i: float(stay.tokens) for i, stay in enumerate(stays)}
    now = first = min(stay.since for stay in stays)
    while left:
        here: dict[str, list[int]] = {}
        for i in left:
            if stays[i].since <= now + 1e-9:
                here.setdefault(stays[i].server, []).append(i)
        for each in here.values():
            for i in each:
                left[i] -= tick / step_s(len(each))
        left = {i: tokens for i, tokens in left.items() if tokens > 1e-9}
        now += tick
    return now - first


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from("ab"), st.integers(1, 20)), min_size=1, max_size=7))
def test_a_replay_takes_as_long_as_decoding_step_by_step(drawn: list[tuple[int, str, int]]) -> None:
    stays = [Stay(since=since / 4, server=server, tokens=tokens) for since, server, tokens in drawn]

    def step_s(count: int) -> float:
        return 0.05 * (1 + count)

    assert makespan_s(stays, step_s) == pytest.approx(stepped_makespan_s(stays, step_s), abs=0.05)


def test_step_times_of_tiers_come_out_of_stays_that_span_several() -> None:
    rng = random.Random(3)
    true = {1: 0.010, 4: 0.014, 16: 0.030}
    times = StepTimes()
    for _ in range(50):
        stay = {tier: rng.uniform(0, 20) for tier in true}
        times.measured(tokens=round(sum(seconds / true[tier] for tier, seconds in stay.items())), tier_seconds=stay)
    assert times.fit() == pytest.approx(true, rel=0.01)


def test_the_measured_saving_is_that_against_the_same_rollout_without_moves() -> None:
    """First rollouts, in which requests start at the same places with and without moves."""
    real: list[float] = []
    measured: list[float] = []
    for seed in range(8):
        took: dict[str, float] = {}
        for transfer in ("none", "recompute"):
            clock = Clock()
            replicas = {f"s{i}": Replica(f"s{i}") for i in range(5)}
            config = {"response_length": 8192, "check_interval": 20, "tiers": [32, 16, 8, 4, 2, 1]}
            router = TokenAwareRouter(replicas, {**config, "transfer": transfer}, clock=clock)
            took[transfer], _ = rollout(router, clock, replicas, draw(seed, prompts=16, siblings=8)[0])
            figures = router.take_metrics()
            if transfer == "none":
                assert figures["equipoise/rollout/measured_saved_seconds"] == 0
        real.append(took["none"] - took["recompute"])
        measured.append(figures["equipoise/rollout/measured_saved_seconds"])
        assert measured[-1] == pytest.approx(real[-1], abs=0.07 * took["none"]), seed
    assert min(real) < -10  # moves that cost time are told as such
    assert sum(measured) == pytest.approx(sum(real), rel=0.2)
