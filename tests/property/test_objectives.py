"""What is made low: lockstep or rank cost, and the overhead of a micro-batch."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq


def lengths_of(seed: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    draw = np.random.default_rng(seed)
    return np.clip(draw.lognormal(6.5, 1.0, n), 1, 8192).astype(np.int64)


@given(seed=st.integers(0, 10_000), dp=st.sampled_from([2, 3, 8]), steps=st.integers(1, 3), tight=st.booleans())
@settings(max_examples=40, deadline=None)
def test_each_objective_is_at_least_as_low_where_it_is_asked_for(seed: int, dp: int, steps: int, tight: bool) -> None:
    lengths = lengths_of(seed, dp * steps * 6)
    cap = int(lengths.max()) if tight else 32768
    common: dict[str, Any] = {"dp_size": dp, "num_mini_batches": steps, "max_token_len_per_gpu": cap}
    objectives: tuple[Literal["lockstep", "rank"], ...] = ("lockstep", "rank")
    plans = {
        objective: eq.plan_step(
            lengths,
            eq.StepSpec(**common, objective=objective),
        )
        for objective in objectives
    }
    assert plans["rank"].stats.rank_cost <= plans["lockstep"].stats.rank_cost * (1 + 1e-9)
    for plan in plans.values():
        assert plan.stats.max_tokens <= cap
        assert plan.stats.rank_cost <= plan.stats.lockstep_cost * (1 + 1e-9)
        assert plan.stats.bound <= plan.stats.tight_bound <= plan.stats.lockstep_cost * (1 + 1e-9)
        assert 0 < plan.stats.efficiency <= 1


@pytest.mark.parametrize("algorithm", ["kk", "lpt"])
def test_the_rank_objective_is_never_above_a_plain_rule(algorithm: Any) -> None:
    for seed in range(20):
        lengths = lengths_of(seed, 96)
        common: dict[str, Any] = {"dp_size": 4, "num_mini_batches": 2, "max_token_len_per_gpu": 9000}
        refined = eq.plan_step(lengths, eq.StepSpec(**common, objective="rank"))
        plain = eq.plan_step(lengths, eq.StepSpec(**common, objective="rank", algorithm=algorithm))
        assert refined.stats.rank_cost <= plain.stats.rank_cost * (1 + 1e-9)


def test_rank_cost_comes_close_to_the_bound_under_a_tight_cap() -> None:
    for seed in range(3):
        lengths = lengths_of(seed, 512)
        cap = int(lengths.max())
        spec = eq.StepSpec(dp_size=16, num_mini_batches=2, max_token_len_per_gpu=cap, objective="rank")
        plan = eq.plan_step(lengths, spec)
        assert plan.stats.rank_cost <= 1.02 * plan.stats.bound


def test_a_micro_batch_more_is_run_only_where_it_saves_more_than_its_overhead() -> None:
    lengths = lengths_of(3, 96)
    overheads = (1e5, 1e6, 1e7, 1e8, 1e12)
    plans = [
        eq.plan_step(
            lengths,
            eq.StepSpec(dp_size=4, max_token_len_per_gpu=16384, micro_batch_overhead=overhead),
            cost=eq.PaddedCost(),
        ).stats
        for overhead in overheads
    ]
    for overhead, plan in zip(overheads, plans, strict=True):
        values = [other.lockstep_cost + overhead * other.num_micro_batches for other in plans]
        assert plan.lockstep_cost + overhead * plan.num_micro_batches <= min(values) * (1 + 1e-9)
    numbers = [plan.num_micro_batches for plan in plans]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]


@pytest.mark.parametrize("overhead", [-1.0, float("nan"), float("inf"), True])
def test_an_impossible_overhead_is_refused(overhead: float) -> None:
    with pytest.raises(eq.InvalidInput, match="micro_batch_overhead"):
        eq.StepSpec(dp_size=2, micro_batch_overhead=overhead)


def test_an_unknown_objective_names_the_nearest() -> None:
    with pytest.raises(eq.InvalidInput, match=r"lock-step.*'lockstep'"):
        eq.StepSpec(dp_size=2, objective="lock-step")  # pyright: ignore[reportArgumentType]
