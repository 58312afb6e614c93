"""Groups kept whole: the reported cases, the ids that are taken, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from equipoise import InfeasiblePlan, InvalidInput, StepPlan, StepSpec, TokenCost, plan_step
from equipoise.planning.partition.shares import share_out
from tests.plan_checker import check_plan
from tests.property.test_groups import check_groups


def draw(n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.minimum(np.random.default_rng(seed).lognormal(6.5, 1.0, n), 8192).astype(np.int64)


def planned(lengths: Any, ids: list[Any], spec: StepSpec, *, is_padding: Any = None) -> StepPlan:
    plan = plan_step(lengths, spec, group_ids=ids, is_padding=is_padding)
    check_groups(plan, ids, is_padding)
    check_plan(plan, [int(length) for length in lengths], spec, is_padding=is_padding)
    return plan


def test_fewer_groups_than_ranks_is_refused_and_the_remedies_work() -> None:
    lengths, ids = [100] * 8, ["a"] * 4 + ["b"] * 4
    spec = StepSpec(dp_size=4, keep_groups="rank")
    with pytest.raises(
        InfeasiblePlan,
        match=r"keep_groups.*dp_size = 4 .*'rank' with 2 groups of 4 rows.*16 rows.*none",
    ):
        plan_step(lengths, spec, group_ids=ids)
    planned(lengths + [2] * 8, ids + ["pad"] * 8, spec, is_padding=[False] * 8 + [True] * 8)
    plan_step(lengths, StepSpec(dp_size=4), group_ids=ids)


def test_no_pair_is_split_by_the_token_cap() -> None:
    ids = [0, 0, 1, 1, 2, 2, 3, 3]
    plan = planned(
        [900, 100, 700, 300, 500, 500, 400, 600],
        ids,
        StepSpec(dp_size=1, max_token_len_per_gpu=1000, keep_groups="micro"),
    )
    assert plan.num_micro_batches == (4,)
    plan = planned(draw(8), ids, StepSpec(dp_size=2, max_token_len_per_gpu=16384, keep_groups="micro"))
    assert all(len(rows) % 2 == 0 for rank in range(2) for rows in plan.micro_batches(rank)[0])


def test_an_odd_row_is_an_error_where_ranks_take_equal_rows() -> None:
    ids = [0, 0, 1, 1, 2, 2, 3, 3, 4]
    with pytest.raises(InfeasiblePlan, match=r"the number of rows.*9"):
        plan_step(draw(9), StepSpec(dp_size=2, keep_groups="micro"), group_ids=ids)
    with pytest.raises(InfeasiblePlan, match=r"the number of rows.*9"):
        plan_step(draw(9), StepSpec(dp_size=1, micro_batch_size_per_gpu=2, keep_groups="micro"), group_ids=ids)


def test_ids_without_keep_groups_change_nothing() -> None:
    lengths, spec = draw(64), StepSpec(dp_size=4, num_mini_batches=2, max_token_len_per_gpu=16384)
    ids = [f"uid {row // 8}" for row in range(64)]
    assert plan_step(lengths, spec, group_ids=ids).order.tolist() == plan_step(lengths, spec).order.tolist()


@pytest.mark.parametrize("keep_groups", ["rank", "micro"])
def test_any_hashable_is_an_id(keep_groups: Any) -> None:
    spec = StepSpec(dp_size=2, keep_groups=keep_groups)
    number = [0, 1, 0, 2, 1, 3, 2, 3]
    names: list[list[Any]] = [
        number,
        [f"uid {g}" for g in number],
        [(g, "turn") for g in number],
        [["a", None, 3, 2.5][g] for g in number],
    ]
    plans = [planned(draw(8), ids, spec).order.tolist() for ids in names]
    plans += [plan_step(draw(8), spec, group_ids=np.array(ids)).order.tolist() for ids in names[:2]]
    assert all(order == plans[0] for order in plans)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (None, r"group_ids.*None"),
        ([0, 1], r"group_ids.*\(2,\)"),
        ([[0], [1], [2], [3]], r"group_ids.*'list'"),
        (7, r"group_ids.*'int'"),
    ],
)
def test_ids_that_cannot_be_are_refused(ids: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        plan_step([1, 2, 3, 4], StepSpec(dp_size=2, keep_groups="rank"), group_ids=ids)
    if ids is not None:
        with pytest.raises(InvalidInput, match=text):
            plan_step([1, 2, 3, 4], StepSpec(dp_size=2), group_ids=ids)


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"keep_groups.*'ranks'"):
        StepSpec(dp_size=1, keep_groups="ranks")  # pyright: ignore[reportArgumentType]


def test_groups_that_do_not_add_up_are_refused_and_padding_helps() -> None:
    lengths, ids = draw(12), [0] * 5 + [1] * 5 + [2] * 2
    for keep_groups, got in (("rank", "'rank'"), ("micro", "'micro'")):
        spec = StepSpec(dp_size=2, keep_groups=keep_groups)  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            InfeasiblePlan,
            match=rf"keep_groups.*dp_size = 2 .*{got} with 3 groups of 2 to 5 rows.*"
            "14 rows.*none",
        ):
            plan_step(lengths, spec, group_ids=ids)
        flags = [False] * 12 + [True] * 2
        planned([*lengths, 2, 2], [*ids, 9, 9], spec, is_padding=flags)


def test_fixed_micro_batches_that_groups_do_not_fill_are_refused() -> None:
    ids = [0] * 3 + [1] * 3 + [2] * 2
    spec = StepSpec(dp_size=2, micro_batch_size_per_gpu=4, keep_groups="micro")
    with pytest.raises(InfeasiblePlan, match=r"keep_groups.*4 rows.*16 rows.*none"):
        plan_step(draw(8), spec, group_ids=ids)
    spec = StepSpec(dp_size=2, micro_batch_size_per_gpu=2, keep_groups="micro")
    with pytest.raises(InfeasiblePlan, match=r"keep_groups.*2 rows.*rank"):
        plan_step(draw(8), spec, group_ids=[0] * 4 + [1] * 4)


def test_a_group_above_the_cap_is_refused() -> None:
    spec = StepSpec(dp_size=1, max_token_len_per_gpu=500, sp_size=2, keep_groups="micro")
    text = r"keep_groups.*1000 tokens.*'micro' with 1 groups.*1101 tokens.*max_token_len_per_gpu to 551.*rank"
    with pytest.raises(InfeasiblePlan, match=text):
        plan_step([600, 501, 10, 10], spec, group_ids=[0, 0, 1, 1])


def test_too_few_groups_for_the_micro_batches_is_refused() -> None:
    spec = StepSpec(dp_size=2, min_micro_batches=2, keep_groups="micro")
    with pytest.raises(InfeasiblePlan, match=r"keep_groups.*min_micro_batches = 2 .*2 groups of 2 rows"):
        plan_step(draw(4), spec, group_ids=[0, 0, 1, 1])


def test_a_group_that_the_composition_cuts_is_kept_in_each_mini_batch() -> None:
    ids = [0] * 3 + [1] * 8 + [2] * 5
    spec = StepSpec(dp_size=2, num_mini_batches=2, keep_groups="rank")
    with pytest.raises(InfeasiblePlan, match="mini-batch 0"):
        plan_step(draw(16), spec, group_ids=ids)
    ids = [0] * 4 + [1] * 8 + [2] * 4
    planned(draw(16), ids, spec)


def test_rollouts_kept_together_cost_little() -> None:
    lengths = draw(1024)
    ids = [row // 8 for row in range(1024)]
    for keep_groups, most in (("rank", 1.01), ("micro", 1.05)):
        spec = StepSpec(dp_size=8, num_mini_batches=2, max_token_len_per_gpu=32768, keep_groups=keep_groups)  # pyright: ignore[reportArgumentType]
        plan = planned(lengths, ids, spec)
        assert plan.stats.lockstep_cost < most * plan.stats.ideal


def test_the_exhaustive_search_finds_what_swaps_do_not() -> None:
    size, room = np.array([6, 3, 4, 1, 6, 4]), np.array([12, 12])  # no single swap fills both bins
    part = share_out(size, np.arange(6.0), room)
    assert part is not None
    assert np.bincount(part, weights=size).tolist() == [12, 12]
    assert share_out(np.array([6, 6, 6]), np.ones(3), np.array([9, 9])) is None


def test_fixed_micro_batches_of_similar_cost_run_together() -> None:
    spec = StepSpec(dp_size=2, micro_batch_size_per_gpu=2, keep_groups="micro", algorithm="lpt")
    plan = plan_step([20, 9, 8, 7, 6, 1, 1, 1], spec, cost=TokenCost(), group_ids=range(8))
    assert plan.stats.lockstep_cost == 31  # of micro-batches that cost 21, 13, 10 and 9
