"""Lengths and checked plans for the planner's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise import StepPlan, StepSpec, plan_step
from equipoise._arrays import IntArray
from tests.plan_checker import check_plan


def planned(lengths: Any, spec: StepSpec, *, is_padding: Any = None) -> StepPlan:
    """A plan that keeps every promise."""
    plan = plan_step(lengths, spec, is_padding=is_padding)
    check_plan(plan, [int(length) for length in lengths], spec, is_padding=is_padding)
    return plan


def draw(n: int, seed: int = 0, longest: int = 8192) -> IntArray:
    return np.clip(np.random.default_rng(seed).lognormal(6.5, 1.0, n), 1, longest).astype(np.int64)


def rows_by_rank(plan: StepPlan) -> list[int]:
    return [plan.rank_rows(rank).size for rank in range(plan.dp_size)]
