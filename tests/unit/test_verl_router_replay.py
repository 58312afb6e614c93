"""What the router of verl's rollout servers says its moves have saved, from a replay without them."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.trainer_hooks.on_verl.router.actor import TokenAwareRouter
from equipoise.trainer_hooks.on_verl.router.replay import Replay, Stay, StepTimes, makespan_s
from tests.unit.router_sim import Clock, Replica, draw, rollout


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


def test_a_saving_is_the_replayed_ratio_times_the_real_seconds() -> None:
    """Two requests of 20 tokens on ``a``, one of which leaves half-way: 30 s with the move, 40 s without."""
    replay = Replay()
    stays = [Stay(since=0.0, server="a", tokens=10), Stay(since=20.0, server="b", tokens=10)]
    for _ in range(2):
        replay.ended(stays, at=60.0)
        replay.ended([Stay(since=0.0, server="a", tokens=20)], at=55.0)
        assert replay.saved_s(float) == pytest.approx(60 * (40 / 30 - 1))  # it really took twice as long
        replay.clear()
        assert replay.saved_s(float) == 0


def test_step_times_of_a_tier_that_is_hardly_seen_are_near_the_mean() -> None:
    times = StepTimes()
    assert times.fit()[4] == 1.0
    times.measured(tokens=100, tier_seconds={1: 10.0})
    times.measured(tokens=0, tier_seconds={1: 1e6})
    times.measured(tokens=1_000_000, tier_seconds={1: 0.0})
    assert times.fit()[1] == pytest.approx(0.1)
    assert times.fit()[4] == pytest.approx(0.1)  # never seen
    times.measured(tokens=101, tier_seconds={1: 10.0, 2: 0.001})
    assert times.fit()[2] == pytest.approx(0.1, rel=0.1)  # not the -1000 tokens a second that would fit best
    times.measured(tokens=100, tier_seconds={1: 10.0, 4: 5.0})
    assert times.fit()[4] == pytest.approx(20 / (301 / 35), rel=0.01)  # nothing decoded: at most 20 times the mean
