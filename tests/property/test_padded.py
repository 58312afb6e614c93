"""Plans for engines that pad micro-batches to their longest row: every promise, with padded tokens and true costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise import InfeasiblePlan, InvalidInput, PaddedCost, PlanStats, StepPlan, StepSpec, TokenCost, plan_step
from tests.plan_checker import REL, transformer_costs

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def draw(n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.minimum(np.random.default_rng(seed).lognormal(6.5, 1.0, n), 8192).astype(np.int64)


def check(plan: StepPlan, lengths: Sequence[int], *, tokens_only: bool = False) -> None:
    """Raise AssertionError where the plan breaks a promise, or where its figures are not those of its micro-batches."""
    spec, costs = plan.spec, [float(n) for n in lengths] if tokens_only else transformer_costs(lengths)
    rows: list[list[list[list[int]]]] = [
        [[ids.tolist() for ids in micros] for micros in plan.micro_batches(rank)] for rank in range(spec.dp_size)
    ]
    assert sorted(row for rank in rows for mini in rank for micro in mini for row in micro) == list(range(len(lengths)))
    lockstep = rank_cost = ideal = bound = 0.0
    most = 0
    for j in range(spec.num_mini_batches):
        steps = [rank[j] for rank in rows]
        assert len({len(step) for step in steps}) == 1
        assert len(steps[0]) % spec.micro_batch_multiple == 0
        assert len(steps[0]) >= spec.min_micro_batches
        sizes = [sum(map(len, step)) for step in steps]
        assert max(sizes) - min(sizes) <= (0 if spec.equal_count else 1)
        loads = [[len(micro) * max(costs[row] for row in micro) for micro in step] for step in steps]
        for micro in (micro for step in steps for micro in step):
            padded = len(micro) * max(lengths[row] for row in micro)
            most = max(most, padded)
            assert spec.cap is None or padded <= spec.cap or (spec.oversize == "alone" and len(micro) == 1)
        lockstep += sum(map(max, zip(*loads, strict=True)))
        rank_cost += max(map(sum, loads))
        own = sum(costs[row] for step in steps for micro in step for row in micro) / spec.dp_size
        ideal += own
        bound += max(own, *(costs[row] for step in steps for micro in step for row in micro))
    expected = {"lockstep_cost": lockstep, "rank_cost": rank_cost, "ideal": ideal, "bound": bound}
    for name, value in expected.items():
        assert np.isclose(getattr(plan.stats, name), value, rtol=REL, atol=0.0), name
    assert plan.stats.max_tokens == most
    assert ideal <= bound * (1 + REL)
    assert bound <= rank_cost * (1 + REL)
    assert rank_cost <= lockstep * (1 + REL)
    assert plan.stats.tight_bound <= lockstep * (1 + REL)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[bool] | None, StepSpec]:
    dp, steps = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 1, 2, 3]))
    n = dp * steps * draw(st.integers(1, 10))
    even = draw(st.booleans())
    n += 0 if even else draw(st.integers(0, dp * steps - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = np.clip(rng.lognormal(5, 1.2, n), 1, 4096).astype(np.int64)
    flags = None
    if draw(st.booleans()):
        where = rng.permutation(n)[: draw(st.integers(0, n - steps))]
        flags = np.zeros(n, dtype=bool)
        flags[where] = True
        lengths[where] = draw(st.sampled_from([2, 300]))
    tightness = draw(st.sampled_from([None, 1.0, 1.5, 4.0]))
    spec = StepSpec(
        dp_size=dp,
        num_mini_batches=steps,
        max_token_len_per_gpu=None if tightness is None else int(int(lengths.max()) * tightness),
        micro_batch_multiple=draw(st.sampled_from([1, 1, 2])),
        min_micro_batches=draw(st.sampled_from([1, 1, 2])),
        equal_count=even,
        composition=draw(st.sampled_from(["keep", "stratified", "sorted"])),
        algorithm=draw(st.sampled_from(["refined", "refined", "kk", "lpt"])),
        objective=draw(st.sampled_from(["lockstep", "rank"])),
        micro_batch_overhead=draw(st.sampled_from([0.0, 1e6, 1e8])),
    )
    return lengths.tolist(), None if flags is None else flags.tolist(), spec


def check_refusal(text: str, spec: StepSpec) -> None:
    assert all(part in text for part in (" must ", ", got ", "; "))
    assert spec.micro_batch_multiple > 1 or spec.min_micro_batches > 1 or not spec.equal_count


def value(stats: PlanStats, spec: StepSpec) -> float:
    cost = stats.lockstep_cost if spec.objective == "lockstep" else stats.rank_cost
    return cost + spec.micro_batch_overhead * stats.num_micro_batches


@QUICK
@given(batches())
def test_padded_plans_keep_every_promise(case: tuple[list[int], list[bool] | None, StepSpec]) -> None:
    lengths, flags, spec = case
    try:
        plan = plan_step(lengths, spec, cost=PaddedCost(), is_padding=flags)
    except InfeasiblePlan as error:
        check_refusal(str(error), spec)
        return
    check(plan, lengths)
    again = plan_step(lengths, spec, cost=PaddedCost(), is_padding=flags)
    assert again.order.tobytes() == plan.order.tobytes()


@QUICK
@given(batches())
def test_refined_never_costs_more_than_a_rule_or_the_batch_as_it_came(
    case: tuple[list[int], list[bool] | None, StepSpec],
) -> None:
    lengths, flags, spec = case
    try:
        plan = plan_step(lengths, dataclasses.replace(spec, algorithm="refined"), cost=PaddedCost(), is_padding=flags)
    except InfeasiblePlan:
        return
    for rule in ("kk", "lpt"):
        try:
            rival = plan_step(lengths, dataclasses.replace(spec, algorithm=rule), cost=PaddedCost(), is_padding=flags)
        except InfeasiblePlan:
            continue
        assert value(plan.stats, spec) <= value(rival.stats, spec) * (1 + REL)
    if spec.equal_count and spec.micro_batch_multiple == 1:
        assert value(plan.stats, spec) <= value(plan.incoming, spec) * (1 + REL)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fixed_micro_batches_hold_rows_of_like_length(size: int) -> None:
    spec = StepSpec(dp_size=4, num_mini_batches=2, micro_batch_size_per_gpu=size)
    plan = plan_step(draw(64), spec, cost=PaddedCost())
    check(plan, draw(64).tolist())
    assert {len(rows) for rank in range(4) for step in plan.micro_batches(rank) for rows in step} == {size}
    assert plan.stats.lockstep_cost <= plan_step(draw(64), spec).stats.lockstep_cost * size


def test_like_lengths_together_waste_far_less_than_evened_out_ones() -> None:
    spec = StepSpec(dp_size=8, num_mini_batches=2, max_token_len_per_gpu=32768)
    lengths = draw(512)
    plan = plan_step(lengths, spec, cost=PaddedCost())
    assert (
        plan.stats.lockstep_cost
        < 0.6 * plan_step(lengths, dataclasses.replace(spec, algorithm="kk"), cost=PaddedCost()).stats.lockstep_cost
    )
    assert plan.stats.lockstep_cost < 0.5 * plan.incoming.lockstep_cost


def test_cuts_are_the_best_of_all_cuts() -> None:
    """One rank, so that tiers are all there is: every way to cut falling rows, tried."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 60, 8)
        falling: list[int] = sorted(lengths.tolist(), reverse=True)
        spec = StepSpec(dp_size=1, max_token_len_per_gpu=100)
        best: dict[int, float] = {}
        for cut in product([False, True], repeat=7):
            edges = [0, *(i + 1 for i, here in enumerate(cut) if here), 8]
            pads = [(b - a) * falling[a] for a, b in pairwise(edges)]
            if max(pads) <= 100:
                best[len(pads)] = min(best.get(len(pads), np.inf), float(sum(pads)))
        plan = plan_step(lengths, spec, cost=PaddedCost(TokenCost()))
        check(plan, lengths.tolist(), tokens_only=True)
        if plan.stats.num_micro_batches == min(best):  # else a plain rule with more of them costs less
            assert plan.stats.lockstep_cost == best[min(best)]
        assert plan.stats.lockstep_cost <= best[min(best)]
        overhead = dataclasses.replace(spec, micro_batch_overhead=12.0)
        plan = plan_step(lengths, overhead, cost=PaddedCost(TokenCost()))
        assert value(plan.stats, overhead) == min(cost + 12.0 * count for count, cost in best.items())


def test_ranks_with_many_rows_are_planned_too() -> None:
    lengths = draw(4800)
    plan = plan_step(lengths, StepSpec(dp_size=4, max_token_len_per_gpu=8192), cost=PaddedCost())
    check(plan, lengths.tolist())
    assert plan.stats.lockstep_cost < 0.5 * plan.incoming.lockstep_cost


def test_padding_rows_are_spread_over_ranks() -> None:
    lengths = np.concatenate([draw(40), np.full(24, 2)])
    flags = np.arange(64) >= 40
    plan = plan_step(lengths, StepSpec(dp_size=4, max_token_len_per_gpu=16384), cost=PaddedCost(), is_padding=flags)
    assert [int((~flags[plan.rank_rows(rank)]).sum()) for rank in range(4)] == [10] * 4


def test_one_row_costs_what_its_model_says() -> None:
    cost = PaddedCost(TokenCost())
    assert cost([3, 5]).tolist() == [3.0, 5.0]
    assert cost.micro_batch([3, 5, 1]) == 15.0


def test_groups_and_padded_micro_batches_exclude_each_other() -> None:
    spec = StepSpec(dp_size=1, keep_groups="rank")
    with pytest.raises(InvalidInput, match=r"keep_groups.*'rank'"):
        plan_step([1, 2], spec, cost=PaddedCost(), group_ids=[0, 1])


def test_a_model_that_returns_no_cost_is_refused() -> None:
    class Broken(PaddedCost):
        def micro_batch(self, lengths: Any) -> float:
            return float("nan")

    with pytest.raises(InvalidInput, match=r"Broken.micro_batch\(lengths\).*nan"):
        plan_step([1, 2], StepSpec(dp_size=1), cost=Broken())


def test_more_than_a_thousand_rows_keep_the_multiple_or_are_refused() -> None:
    common: dict[str, Any] = {"dp_size": 2, "micro_batch_multiple": 2, "max_token_len_per_gpu": 100}
    with pytest.raises(InfeasiblePlan, match="micro_batch_multiple = 2"):
        plan_step([100] * 2050, StepSpec(**common), cost=PaddedCost())
    plan = plan_step([100] * 2052, StepSpec(**common), cost=PaddedCost())
    assert plan.num_micro_batches == (1026,)


def test_many_rows_cost_no_more_than_by_a_plain_rule() -> None:
    lengths = [4000] + [i % 19 + 1 for i in range(515)]
    lockstep = {
        algorithm: plan_step(
            lengths,
            StepSpec(dp_size=4, max_token_len_per_gpu=4000, algorithm=cast(Any, algorithm)),
            cost=PaddedCost(),
        ).stats.lockstep_cost
        for algorithm in ("refined", "kk", "lpt")
    }
    assert lockstep["refined"] <= min(lockstep["kk"], lockstep["lpt"])
