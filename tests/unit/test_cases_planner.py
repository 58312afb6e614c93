"""Reported cases for the planner: divisibility, the cap, equal counts, padding, order and speed."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
import torch

from equipoise import (
    EquipoiseWarning,
    InfeasiblePlan,
    InvalidInput,
    StepSpec,
    TokenCost,
    padded_batch_size,
    plan_step,
    required_batch_multiple,
)
from tests.plan_checker import check_plan
from tests.unit.planner_cases import draw, planned, rows_by_rank

# -- batch size and divisibility --------------------------------------------------------------------------------------


def test_rows_are_dealt_to_data_parallel_ranks_not_to_the_world() -> None:
    plan = planned(draw(16), StepSpec(dp_size=8))  # 32 processes, of which tensor × pipeline = 4 share their rows
    assert rows_by_rank(plan) == [2] * 8


def test_uneven_counts_differ_by_at_most_one() -> None:
    plan = planned(draw(206), StepSpec(dp_size=4, equal_count=False))
    assert sorted(rows_by_rank(plan)) == [51, 51, 52, 52]
    tokens = [int(draw(206)[plan.rank_rows(rank)].sum()) for rank in range(4)]
    assert max(tokens) <= 1.1 * min(tokens)


@pytest.mark.parametrize("equal_count", [True, False])
def test_fewer_rows_than_ranks_is_an_early_error(equal_count: bool) -> None:
    with pytest.raises(InfeasiblePlan, match=r"dp_size × num_mini_batches = 4 × 1 = 4.*3.*4 rows"):
        plan_step([5, 6, 7], StepSpec(dp_size=4, equal_count=equal_count))


@pytest.mark.parametrize("n", [4, 5, 9])
def test_every_row_survives_and_no_rank_is_empty(n: int) -> None:
    plan = planned(draw(n), StepSpec(dp_size=4, equal_count=False))
    assert min(rows_by_rank(plan)) >= 1
    assert sorted(plan.order.tolist()) == list(range(n))


def test_padding_up_to_ranks_and_steps_keeps_the_number_of_steps() -> None:
    spec = StepSpec(dp_size=8, num_mini_batches=4, max_token_len_per_gpu=16384)  # 16 of 64 prompts to a step
    lengths = draw(1032)
    with pytest.raises(InfeasiblePlan, match=r"8 × 4 = 32.*1032.*1056 rows"):
        plan_step(lengths, spec)
    assert padded_batch_size(1032, dp_size=8, num_steps=4, rule="steps") == 1056
    padded = np.append(lengths, np.full(24, 2))
    plan = planned(padded, spec, is_padding=np.arange(1056) >= 1032)
    assert plan.num_mini_batches == 4
    assert plan.stats.num_padding == 24


def test_required_multiple_is_the_lcm_of_the_roles() -> None:
    assert required_batch_multiple(8, [64 * 4, 48 * 4]) == 768


def test_lcm_rule_and_fixed_steps() -> None:
    padded = padded_batch_size(298, dp_size=2, mini_batch_sizes=[128])
    assert (padded, padded - 298, padded // 128) == (384, 86, 3)
    assert padded_batch_size(298, dp_size=2, num_steps=2, rule="steps") == 300
    for n, steps in ((384, 3), (300, 2)):
        lengths = np.append(draw(298), np.full(n - 298, 2))
        spec = StepSpec(dp_size=2, num_mini_batches=steps)
        plan = planned(lengths, spec, is_padding=np.arange(n) >= 298)
        assert plan.num_mini_batches == steps


def test_ten_rows_over_three_ranks() -> None:
    assert rows_by_rank(planned(draw(10), StepSpec(dp_size=3, equal_count=False))) == [4, 3, 3]


def test_fixed_micro_batch_that_does_not_divide_names_a_legal_batch() -> None:
    spec = StepSpec(dp_size=8, micro_batch_size_per_gpu=3)
    with pytest.raises(InfeasiblePlan, match=r"8 × 1 × 3 × 1 = 24.*8.*24 rows.*micro_batch_size_per_gpu of 1$"):
        plan_step(draw(8), spec)
    planned(draw(24), spec)
    planned(draw(8), dataclasses.replace(spec, micro_batch_size_per_gpu=1))


def test_the_number_of_micro_batches_is_rounded_up_to_the_multiple() -> None:
    spec = StepSpec(dp_size=1, max_token_len_per_gpu=100, micro_batch_multiple=4)
    plan = planned([30] * 15, spec)  # three to a micro-batch: five are needed
    assert plan.num_micro_batches == (8,)


def test_too_few_rows_for_the_multiple_is_a_clear_error() -> None:
    spec = StepSpec(dp_size=1, max_token_len_per_gpu=100, micro_batch_multiple=4)
    with pytest.raises(InfeasiblePlan, match=r"max_token_len_per_gpu.*micro_batch_multiple = 4.*120"):
        plan_step([60] * 5, spec)  # five micro-batches are needed, and eight would leave three empty
    planned([60] * 5, dataclasses.replace(spec, max_token_len_per_gpu=120))


def test_31_rows_over_8_ranks_need_one_more() -> None:
    with pytest.raises(InfeasiblePlan, match=r"the number of rows.*31.*32 rows"):
        plan_step(draw(31), StepSpec(dp_size=8))
    assert padded_batch_size(31, dp_size=8) == 32
    assert padded_batch_size(31, dp_size=8, num_steps=1, rule="steps") == 32
    lengths = np.append(draw(31), 2)
    plan = planned(lengths, StepSpec(dp_size=8), is_padding=[False] * 31 + [True])
    assert plan.stats.num_padding == 1


def test_an_empty_batch_is_a_clear_error() -> None:
    with pytest.raises(InvalidInput, match=r"lengths.*\[\]"):
        plan_step([], StepSpec(dp_size=8))
    with pytest.raises(InvalidInput, match=r"num_rows.*0"):
        padded_batch_size(0, dp_size=8)


@pytest.mark.parametrize(
    ("rows", "dp", "steps"), [(1, 1, 1), (298, 2, 2), (7, 8, 3), (1032, 8, 4), (4097, 64, 16), (64, 4, 4)]
)
def test_fixed_steps_pad_to_the_fewest_rows_that_divide(rows: int, dp: int, steps: int) -> None:
    padded = padded_batch_size(rows, dp_size=dp, num_steps=steps, rule="steps")
    assert padded == next(n for n in range(rows, rows + dp * steps) if n % (dp * steps) == 0)
    assert padded_batch_size(padded, dp_size=dp, num_steps=steps, rule="steps") == padded


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rule": "step"}, r"rule.*'step'"),
        ({"num_steps": 2}, r"num_steps.*2"),
        ({"rule": "steps"}, r"num_steps.*None"),
        ({"rule": "steps", "num_steps": 2, "mini_batch_sizes": [8]}, r'mini_batch_sizes must be empty with rule="st'),
        ({"rule": "steps", "num_steps": 9}, r"num_steps.*9"),
        ({"mini_batch_sizes": [6]}, r"mini_batch_sizes.*6"),
    ],
)
def test_padding_rules_refuse_what_they_would_ignore(arguments: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        padded_batch_size(8, dp_size=4, **arguments)


# -- token cap --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cap", "lengths"), [(8, [7] * 8), (32768, [30720] * 16)])
@pytest.mark.parametrize("algorithm", ["refined", "kk", "lpt"])
def test_rows_that_fill_the_cap_stand_alone(cap: int, lengths: list[int], algorithm: Any) -> None:
    plan = planned(lengths, StepSpec(dp_size=1, max_token_len_per_gpu=cap, algorithm=algorithm))
    assert plan.num_micro_batches == (len(lengths),)
    assert plan.stats.max_tokens <= cap


def test_real_tokens_count_not_the_padded_width() -> None:
    lengths = np.random.default_rng(0).integers(1, 501, 64)  # of a batch that is 40960 wide
    planned(lengths, StepSpec(dp_size=4, max_token_len_per_gpu=16384))


def test_a_row_above_the_cap_is_an_error_that_names_row_length_and_cap() -> None:
    with pytest.raises(InfeasiblePlan, match=r"lengths\[2\].*4097"):
        plan_step([1, 2, 4097, 4], StepSpec(dp_size=2, max_token_len_per_gpu=4096))
    planned([1, 2, 4097, 4], StepSpec(dp_size=2, max_token_len_per_gpu=4097))


def test_a_row_above_the_cap_may_stand_alone_with_a_warning() -> None:
    spec = StepSpec(dp_size=2, max_token_len_per_gpu=4096, oversize="alone")
    with pytest.warns(EquipoiseWarning, match=r"lengths\[2\].*4097"):
        plan = plan_step([1, 2, 4097, 4], spec)
    check_plan(plan, [1, 2, 4097, 4], spec)
    assert [2] in [rows.tolist() for rank in range(2) for rows in plan.micro_batches(rank)[0]]


@pytest.mark.parametrize("algorithm", ["refined", "kk", "lpt"])
@pytest.mark.parametrize("cost", [None, TokenCost()])
def test_no_micro_batch_is_above_the_cap_whatever_the_objective(algorithm: Any, cost: Any) -> None:
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 9001, 24)
        plan = plan_step(lengths, StepSpec(dp_size=8, max_token_len_per_gpu=9216, algorithm=algorithm), cost=cost)
        assert plan.stats.max_tokens <= 9216


def test_cap_and_balance_hold_together() -> None:
    spec = StepSpec(dp_size=8, num_mini_batches=2, max_token_len_per_gpu=16384)
    plan = planned(draw(512), spec)
    assert plan.stats.max_tokens <= 16384
    assert plan.stats.lockstep_cost <= 1.05 * plan.stats.bound


# -- the same count on all ranks --------------------------------------------------------------------------------------


def test_the_fewest_micro_batches_asked_for_are_made() -> None:
    plan = planned([1000] * 4, StepSpec(dp_size=1, max_token_len_per_gpu=4096, min_micro_batches=3))
    assert plan.num_micro_batches == (3,)


def test_fixed_micro_batches_that_do_not_divide_are_refused() -> None:
    spec = StepSpec(dp_size=2, micro_batch_size_per_gpu=2)
    with pytest.raises(InfeasiblePlan, match=r"2 × 1 × 2 × 1 = 4.*5.*8 rows.*4"):
        plan_step(draw(5), spec)
    planned(draw(8), spec)
    planned(draw(4), spec)


def test_the_number_of_steps_is_the_same_on_every_rank() -> None:
    plan = planned([30, 20, 10], StepSpec(dp_size=2, equal_count=False))
    assert [len(plan.micro_batches(rank)) for rank in range(2)] == [1, 1]
    with pytest.raises(InfeasiblePlan, match=r"2 × 2 = 4.*3.*4 rows"):
        plan_step([30, 20, 10], StepSpec(dp_size=2, num_mini_batches=2, equal_count=False))


# -- padding, order, cost and speed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("composition", ["keep", "stratified", "sorted"])
def test_padding_is_spread_over_steps_and_ranks(composition: Any) -> None:
    lengths = np.append(draw(298), np.full(86, 2))
    is_padding = np.arange(384) >= 298
    spec = StepSpec(dp_size=2, num_mini_batches=3, max_token_len_per_gpu=16384, composition=composition)
    plan = planned(lengths, spec, is_padding=is_padding)
    assert max(plan.num_real_rows) - min(plan.num_real_rows) <= 2
    real = [[int((~is_padding[np.concatenate(step)]).sum()) for step in plan.micro_batches(rank)] for rank in range(2)]
    assert all(abs(a - b) <= 1 for a, b in zip(*real, strict=True)), real
    assert abs(sum(real[0]) - sum(real[1])) <= 1


def test_the_cap_does_not_change_the_number_of_updates() -> None:
    for cap in (None, 65536, 8192):
        plan = planned(draw(256), StepSpec(dp_size=4, num_mini_batches=4, max_token_len_per_gpu=cap))
        assert plan.num_mini_batches == len(plan.micro_batches(0)) == 4


def test_every_kind_of_lengths_gives_the_same_plan_in_the_same_time() -> None:
    lengths = draw(2048)
    spec = StepSpec(dp_size=32, num_mini_batches=4, max_token_len_per_gpu=32768)
    kinds: dict[str, Any] = {
        "int64": lengths,
        "int32": lengths.astype(np.int32),
        "list": lengths.tolist(),
        "float": lengths.astype(np.float32),
        "tensor": torch.from_numpy(lengths),
        "int32 tensor": torch.from_numpy(lengths.astype(np.int32)),
    }
    seconds: dict[str, float] = {}
    orders: dict[str, list[int]] = {}
    for name, value in kinds.items():
        runs: list[float] = []
        for _ in range(3):
            start = time.process_time()
            orders[name] = plan_step(value, spec).order.tolist()
            runs.append(time.process_time() - start)
        seconds[name] = min(runs)
    assert all(order == orders["int64"] for order in orders.values())
    assert max(seconds.values()) <= 5 * min(seconds.values()) + 0.05, seconds


@pytest.mark.parametrize(("cap", "limit_s"), [(None, 3.0), (32768, 3.0), (8192, 6.0)])  # 0.3 to 1.2 s when quiet
def test_65536_rows_are_planned_in_seconds(cap: int | None, limit_s: float) -> None:
    lengths = draw(65536)
    spec = StepSpec(dp_size=512, num_mini_batches=8, max_token_len_per_gpu=cap)
    start = time.process_time()
    plan = plan_step(lengths, spec)
    assert time.process_time() - start < limit_s
    check_plan(plan, lengths.tolist(), spec)
    assert plan.stats.efficiency >= 0.97  # against the bound that knows the cap
