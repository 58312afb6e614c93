"""The checker of plans finds what is wrong with a plan: each corruption of a good one is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from equipoise import StepPlan, StepSpec, plan_step
from tests.plan_checker import check_plan

LENGTHS = [90, 80, 70, 60, 50, 40, 30, 20, 95, 85, 75, 65, 55, 45, 35, 25]
SPEC = StepSpec(dp_size=2, num_mini_batches=2, max_token_len_per_gpu=150, micro_batch_multiple=2)


def good_plan() -> StepPlan:
    return plan_step(LENGTHS, SPEC)


def _order(plan: StepPlan, change: Callable[[list[int]], None]) -> StepPlan:
    order = plan.order.tolist()
    change(order)
    return dataclasses.replace(plan, order=np.array(order))


def _sizes(plan: StepPlan, first: list[list[int]]) -> StepPlan:
    return dataclasses.replace(plan, sizes=(np.array(first), *plan.sizes[1:]))


def _row_twice(plan: StepPlan) -> StepPlan:
    def change(order: list[int]) -> None:
        order[0] = order[1]

    return _order(plan, change)


def _rows_of_two_steps_swapped(plan: StepPlan) -> StepPlan:
    def change(order: list[int]) -> None:
        order[0], order[4] = order[4], order[0]

    return _order(plan, change)


def _long_rows_together(plan: StepPlan) -> StepPlan:
    def change(order: list[int]) -> None:
        order[:4], order[8:12] = [0, 1, 6, 7], [2, 3, 4, 5]  # ranks 0 and 1 of the first step; 90 + 80 is above 150

    return _sizes(_order(plan, change), [[2, 2], [2, 2]])


def _empty_micro_batch(plan: StepPlan) -> StepPlan:
    return _sizes(plan, [[4, 0], plan.sizes[0][1].tolist()])


def _one_micro_batch(plan: StepPlan) -> StepPlan:
    return _sizes(plan, [[4], [4]])


def _uneven_ranks(plan: StepPlan) -> StepPlan:
    return _sizes(plan, [[2, 3], [1, 2]])


def _fewer_steps(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, sizes=(np.concatenate(plan.sizes, axis=1),))


def _wrong_real_rows(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, num_real_rows=np.array([7, 8]))


def _wrong_stats(field: str) -> Callable[[StepPlan], StepPlan]:
    def change(plan: StepPlan) -> StepPlan:
        value = getattr(plan.stats, field)
        return dataclasses.replace(plan, stats=dataclasses.replace(plan.stats, **{field: value + 1}))

    return change


CORRUPTIONS: dict[str, Callable[[StepPlan], StepPlan]] = {
    "a row twice": _row_twice,
    "rows of two steps swapped": _rows_of_two_steps_swapped,
    "above the cap": _long_rows_together,
    "an empty micro-batch": _empty_micro_batch,
    "no multiple": _one_micro_batch,
    "uneven ranks": _uneven_ranks,
    "fewer steps": _fewer_steps,
    "wrong real rows": _wrong_real_rows,
    **{
        f"wrong {field}": _wrong_stats(field)
        for field in (
            "lockstep_cost",
            "rank_cost",
            "ideal",
            "bound",
            "max_tokens",
            "num_micro_batches",
            "num_padding",
        )
    },
}


def test_accepts_a_good_plan() -> None:
    check_plan(good_plan(), LENGTHS, SPEC)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_refuses_a_corrupted_plan(name: str) -> None:
    with pytest.raises(AssertionError):
        check_plan(CORRUPTIONS[name](good_plan()), LENGTHS, SPEC)


def test_refuses_a_step_of_padding_only() -> None:
    plan = good_plan()
    padding = [row < 8 for row in range(16)]
    with pytest.raises(AssertionError, match="real rows"):
        check_plan(plan, LENGTHS, SPEC, is_padding=padding)


def test_refuses_unfixed_micro_batches() -> None:
    plan = plan_step(LENGTHS, StepSpec(dp_size=2, micro_batch_size_per_gpu=4))
    check_plan(plan, LENGTHS, plan.spec)
    with pytest.raises(AssertionError):
        check_plan(plan, LENGTHS, dataclasses.replace(plan.spec, micro_batch_size_per_gpu=2))
