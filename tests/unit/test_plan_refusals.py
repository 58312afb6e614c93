"""What the planner refuses: each error names field, value and rule, and its remedy works."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from equipoise import (
    InfeasiblePlan,
    InvalidInput,
    StepSpec,
    plan_step,
)
from tests.plan_checker import check_plan
from tests.unit.planner_cases import planned

# -- texts: each refusal names the field, the value and the rule, and following it leads to a plan -------------------

REFUSED: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "rows divide": (30, {"dp_size": 4}, "the number of rows", "30"),
    "rows divide, few": (3, {"dp_size": 4, "num_mini_batches": 2}, "the number of rows", "3"),
    "rows, uneven": (3, {"dp_size": 4, "equal_count": False}, "the number of rows", "3"),
    "fixed": (24, {"dp_size": 4, "micro_batch_size_per_gpu": 4}, "the number of rows", "24"),
    "fixed, multiple": (
        24,
        {"dp_size": 4, "micro_batch_size_per_gpu": 2, "micro_batch_multiple": 2},
        "the number of rows",
        "24",
    ),
    "fixed, least": (
        24,
        {"dp_size": 4, "micro_batch_size_per_gpu": 3, "min_micro_batches": 3},
        "the number of rows",
        "24",
    ),
    "fixed, uneven": (
        26,
        {"dp_size": 4, "micro_batch_size_per_gpu": 2, "equal_count": False},
        "the number of rows",
        "26",
    ),
    "multiple": (8, {"dp_size": 4, "micro_batch_multiple": 3}, "micro_batch_multiple", "3"),
    "least": (8, {"dp_size": 4, "min_micro_batches": 3}, "min_micro_batches", "3"),
    "least, multiple": (
        20,
        {"dp_size": 4, "min_micro_batches": 5, "micro_batch_multiple": 2},
        "min_micro_batches",
        "5",
    ),
    "cap, multiple": (
        20,
        {"dp_size": 4, "micro_batch_multiple": 3, "max_token_len_per_gpu": 100},
        "max_token_len_per_gpu",
        "100",
    ),
    "cap, shared tokens": (
        20,
        {"dp_size": 4, "micro_batch_multiple": 3, "max_token_len_per_gpu": 34, "sp_size": 3},
        "max_token_len_per_gpu",
        "34",
    ),
    "cap, uneven": (
        18,
        {"dp_size": 4, "equal_count": False, "max_token_len_per_gpu": 100},
        "max_token_len_per_gpu",
        "100",
    ),
}


def follow(remedy: str, n: int, settings: Mapping[str, Any], field: str) -> tuple[int, dict[str, Any]]:
    """Rows and settings after one remedy of an error about ``field``."""
    if found := re.search(r"(?:pad|drop) to (\d+)", remedy):
        return int(found[1]), dict(settings)
    if found := re.search(r"use a (\w+) of (\d+)", remedy):
        return n, {**settings, found[1]: int(found[2])}
    if found := re.search(r"set equal_count=False", remedy):
        return n, {**settings, "equal_count": False}
    found = re.search(r"(?:use at most|raise it to|use) (\d+)", remedy)
    assert found is not None, f"no value in {remedy!r}"
    changed: dict[str, Any] = {**settings, field: int(found[1])}
    return n, changed


@pytest.mark.parametrize("name", REFUSED)
def test_each_remedy_of_a_refusal_works(name: str) -> None:
    n, settings, field, value = REFUSED[name]
    with pytest.raises(InfeasiblePlan) as caught:
        plan_step([61] * n, StepSpec(**settings))
    text = str(caught.value)
    head, remedies = text.split("; ", 1)
    assert head.startswith(f"{field} must ")
    assert head.endswith(f", got {value}")
    for remedy in remedies.split(" or "):
        rows, changed = follow(remedy, n, settings, field)
        assert (rows, changed) != (n, settings), remedy
        spec = StepSpec(**changed)
        lengths = [61] * min(rows, n) + [2] * max(rows - n, 0)
        planned(lengths, spec, is_padding=[row >= n for row in range(rows)])


def test_the_remedy_for_too_few_real_rows_works() -> None:
    is_padding = np.arange(32) >= 3
    lengths = np.where(is_padding, 2, 50)
    spec = StepSpec(dp_size=8, num_mini_batches=4)
    with pytest.raises(InfeasiblePlan, match=r"num_mini_batches.* 3.* 4.* 2$"):
        plan_step(lengths, spec, is_padding=is_padding)  # 3 steps of 32 rows would leave ranks uneven
    planned(lengths, dataclasses.replace(spec, num_mini_batches=2), is_padding=is_padding.tolist())


def test_a_batch_of_padding_only_is_refused() -> None:
    with pytest.raises(InfeasiblePlan, match=r"num_mini_batches.* 0"):
        plan_step([2] * 4, StepSpec(dp_size=2), is_padding=[True] * 4)


def test_a_plan_is_found_where_only_the_roomiest_layout_fits() -> None:
    """The long row stands alone on one rank, and the other rank takes all padding."""
    lengths, is_padding = [8, 2, 20], [True, True, False]
    for algorithm in ("refined", "kk", "lpt"):
        spec = StepSpec(dp_size=2, max_token_len_per_gpu=20, equal_count=False, algorithm=algorithm)
        planned(lengths, spec, is_padding=is_padding)


def test_the_batch_as_it_came_is_kept_where_it_costs_least() -> None:
    lengths = [813, 514, 588, 307, 1181, 498]
    spec = StepSpec(dp_size=3, micro_batch_size_per_gpu=1)
    plan = planned(lengths, spec, is_padding=[True, True, False, False, False, False])
    assert plan.stats.lockstep_cost <= plan.incoming.lockstep_cost


def test_several_rows_above_the_cap_are_counted() -> None:
    with pytest.raises(InfeasiblePlan, match=r"lengths\[1\].*30.*2 rows"):
        plan_step([1, 30, 20, 3], StepSpec(dp_size=2, max_token_len_per_gpu=10))


def test_the_remedy_for_a_long_row_counts_the_gpus_that_share_it() -> None:
    with pytest.raises(InfeasiblePlan, match=r"10 × 3 = 30.*37.*max_token_len_per_gpu to 13 "):
        plan_step([1, 37], StepSpec(dp_size=2, max_token_len_per_gpu=10, sp_size=3))
    planned([1, 37], StepSpec(dp_size=2, max_token_len_per_gpu=13, sp_size=3))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dp_size": 0}, r"dp_size.*0"),
        ({"dp_size": 2.0}, r"dp_size.*2.0"),
        ({"dp_size": True}, r"dp_size.*True"),
        ({"num_mini_batches": 0}, r"num_mini_batches must be .* got 0"),
        ({"sp_size": -1}, r"sp_size must be .* got -1; use 1"),
        ({"micro_batch_multiple": 0}, r"micro_batch_multiple must be .* got 0; use 1"),
        ({"min_micro_batches": 0}, r"min_micro_batches must be .* got 0; use 1"),
        ({"max_token_len_per_gpu": 0}, r"max_token_len_per_gpu must be .* got 0"),
        ({"micro_batch_size_per_gpu": 0}, r"micro_batch_size_per_gpu must be .* got 0"),
        (
            {"micro_batch_size_per_gpu": 2, "max_token_len_per_gpu": 9},
            r"micro_batch_size_per_gpu.*2",
        ),
        ({"algorithm": "refind"}, r"algorithm.*'refind'"),
        ({"composition": "kept"}, r"composition.*'kept'"),
        ({"oversize": "x"}, r"oversize.*'x'"),
        ({"seed": -1}, r"seed.*-1"),
    ],
)
def test_settings_that_break_their_rule_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        StepSpec(**dict[str, Any](dp_size=2) | settings)


@pytest.mark.parametrize(
    ("is_padding", "text"),
    [
        ([False], r"is_padding.*\(1,\)"),
        ([False, 2], r"is_padding"),
        (["a", "b"], r"is_padding"),
        ([[False], [False, True]], r"is_padding"),
    ],
)
def test_flags_that_are_none_are_refused(is_padding: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        plan_step([1, 2], StepSpec(dp_size=2), is_padding=is_padding)


def test_flags_may_be_a_tensor() -> None:
    lengths = [9, 8, 7, 2]
    plan = plan_step(lengths, StepSpec(dp_size=2), is_padding=torch.tensor([0, 0, 0, 1]))
    check_plan(plan, lengths, plan.spec, is_padding=[False, False, False, True])


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(InvalidInput, match=rf"rank.*1.*{rank}"):
        plan_step([1, 2], StepSpec(dp_size=2)).micro_batches(rank)


def test_the_remedy_for_fixed_micro_batches_is_the_nearest_legal_size() -> None:
    with pytest.raises(InfeasiblePlan, match=r"micro_batch_size_per_gpu of 4$"):
        plan_step([9] * 16, StepSpec(dp_size=2, micro_batch_size_per_gpu=5))


def test_one_row_above_the_cap_is_not_counted() -> None:
    with pytest.raises(InfeasiblePlan, match=r"lengths\[1\].*9") as caught:
        plan_step([1, 9], StepSpec(dp_size=2, max_token_len_per_gpu=8))
    assert "rows are above" not in str(caught.value)
