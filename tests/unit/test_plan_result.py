"""What a plan says of itself, and what it is by default."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest

from equipoise import (
    StepSpec,
    TokenCost,
    plan_step,
)
from tests.unit.planner_cases import draw, planned

# -- the result -------------------------------------------------------------------------------------------------------


def test_plans_are_read_only() -> None:
    plan = plan_step(draw(16), StepSpec(dp_size=2))
    for array in (plan.order, plan.inverse, plan.sizes[0], plan.num_real_rows):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_metrics_compare_the_plan_with_the_batch_as_it_came() -> None:
    plan = planned([100, 90, 1, 2], StepSpec(dp_size=2, max_token_len_per_gpu=200))
    metrics = plan.metrics("b/")
    assert metrics["b/lockstep_over_bound"] == plan.stats.lockstep_cost / plan.stats.bound
    assert metrics["b/lockstep_over_bound_incoming"] > 1.5 > metrics["b/lockstep_over_bound"]
    assert metrics["b/efficiency"] == plan.stats.tight_bound / plan.stats.lockstep_cost == 1.0
    assert 0 <= metrics["b/idle_share"] < metrics["b/idle_share_incoming"] < 1
    assert metrics["b/num_padding"] == 0.0
    assert all(isinstance(value, float) for value in metrics.values())


def test_rows_that_cost_nothing_are_planned_and_measured() -> None:
    plan = planned([0] * 8, StepSpec(dp_size=2, num_mini_batches=2, max_token_len_per_gpu=1))
    assert plan.stats.efficiency == 1.0
    assert plan.metrics()["balance/lockstep_over_bound"] == 1.0


def test_the_costliest_micro_batch_runs_first() -> None:
    lengths = draw(256)
    plan = planned(lengths, StepSpec(dp_size=4, num_mini_batches=2, max_token_len_per_gpu=10000))
    cost = 24576.0 * lengths + lengths.astype(np.float64) ** 2
    for j in range(2):
        columns = zip(*(plan.micro_batches(rank)[j] for rank in range(4)), strict=True)
        tops = [max(float(cost[rows].sum()) for rows in column) for column in columns]
        assert len(tops) > 1
        assert tops == sorted(tops, reverse=True)


def test_the_figures_of_the_batch_as_it_came() -> None:
    lengths = [9, 1, 5, 5]
    plan = plan_step(lengths, StepSpec(dp_size=2, max_token_len_per_gpu=10), cost=TokenCost())
    assert plan.incoming.lockstep_cost == 10.0
    plan = plan_step([6, 5, 1, 2], StepSpec(dp_size=2, max_token_len_per_gpu=10), cost=TokenCost())
    assert plan.incoming.num_micro_batches == 2  # 6 and 5 do not fit together
    assert plan.incoming.lockstep_cost == 6.0 + 5.0


def test_stratified_steps_are_alike_and_drawn_by_the_seed() -> None:
    lengths = np.sort(draw(512))
    spec = StepSpec(dp_size=4, num_mini_batches=4, composition="stratified")
    plan = planned(lengths, spec)
    rows = [np.concatenate([np.concatenate(plan.micro_batches(rank)[j]) for rank in range(4)]) for j in range(4)]
    tokens = [int(lengths[step].sum()) for step in rows]
    assert max(tokens) < 1.1 * min(tokens)
    assert planned(lengths, spec).order.tolist() == plan.order.tolist()
    assert planned(lengths, dataclasses.replace(spec, seed=1)).order.tolist() != plan.order.tolist()


def test_no_warning_without_a_long_row() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(draw(16), StepSpec(dp_size=2, max_token_len_per_gpu=8192, oversize="alone"))


def test_settings_of_numpy_integers_do_not_overflow() -> None:
    wide: dict[str, Any] = {"max_token_len_per_gpu": np.int32(1_200_000_000), "sp_size": np.int16(4)}
    assert StepSpec(dp_size=2, **wide).cap == 4_800_000_000
    narrow: dict[str, Any] = {"dp_size": np.uint8(2), "num_mini_batches": np.int8(2)}
    planned([4, 3, 2, 1], StepSpec(**narrow))
