"""Which rows each optimizer step gets, and what that does to the lengths that it sees."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.composition import correlation, figures, table
from equipoise import EquipoiseConfig, StepPlan, StepSpec, plan_step
from tests.plan_checker import check_plan

STEPS = 4
SPEC = StepSpec(dp_size=4, num_mini_batches=STEPS, max_token_len_per_gpu=16384, algorithm="lpt")


IntArray = npt.NDArray[np.int64]


def draw(n: int, seed: int = 0) -> IntArray:
    return np.minimum(np.random.default_rng(seed).lognormal(6.5, 1.0, n), 8192).astype(np.int64)


def steps_of(plan: StepPlan) -> list[IntArray]:
    """Row ids of each optimizer step."""
    ranks = [plan.micro_batches(rank) for rank in range(plan.dp_size)]
    return [np.concatenate([np.concatenate(rank[j]) for rank in ranks]) for j in range(plan.num_mini_batches)]


def planned(lengths: IntArray, composition: Any, *, seed: int = 0, is_padding: Any = None) -> StepPlan:
    spec = dataclasses.replace(SPEC, composition=composition, seed=seed)
    plan = plan_step(lengths, spec, is_padding=is_padding)
    check_plan(plan, lengths.tolist(), spec, is_padding=is_padding)
    return plan


@pytest.mark.parametrize("order", ["drawn", "falling", "rising"])
def test_stratified_steps_get_one_row_of_every_stratum(order: str) -> None:
    lengths = draw(256)
    if order != "drawn":
        lengths = np.sort(lengths) if order == "rising" else -np.sort(-lengths)
    plan = planned(lengths, "stratified")
    stratum = np.empty(256, dtype=np.int64)  # the four longest rows are stratum 0, the next four stratum 1
    stratum[np.argsort(-lengths, kind="stable")] = np.arange(256) // STEPS
    for rows in steps_of(plan):
        assert sorted(stratum[rows].tolist()) == list(range(256 // STEPS))


def test_stratified_steps_are_in_no_order_of_length() -> None:
    first_in = np.zeros(STEPS)
    for seed in range(40):
        lengths = np.sort(draw(256, seed))
        longest = [int(lengths[rows].max()) for rows in steps_of(planned(lengths, "stratified", seed=seed))]
        first_in[int(np.argmax(longest))] += 1
    assert first_in.min() > 0, "the longest row of all comes into each step at times"
    r = [figures("lognormal", "stratified", seed).r for seed in range(3)]
    assert max(map(abs, r)) < 0.02


def test_stratified_steps_follow_the_seed_alone() -> None:
    lengths = draw(256)
    orders = [planned(lengths, "stratified", seed=seed).order.tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_sorted_steps_hold_rows_of_like_length_the_longest_first() -> None:
    lengths = draw(256)
    steps = steps_of(planned(lengths, "sorted"))
    for before, after in pairwise(steps):
        assert lengths[before].min() >= lengths[after].max()
    assert correlation(planned(lengths, "sorted"), lengths.tolist()) < -0.5
    assert planned(lengths, "sorted", seed=3).order.tolist() == planned(lengths, "sorted").order.tolist()


@pytest.mark.parametrize("composition", ["keep", "stratified", "sorted"])
@pytest.mark.parametrize("where", ["start", "end"])
def test_padding_is_spread_over_the_steps_of_every_composition(composition: str, where: str) -> None:
    pads = np.full(56, 2)
    lengths = np.concatenate([pads, draw(200)] if where == "start" else [draw(200), pads])
    is_padding = np.arange(256) < 56 if where == "start" else np.arange(256) >= 200
    plan = planned(lengths, composition, is_padding=is_padding)
    assert plan.num_real_rows.tolist() == [50] * 4


def test_sorted_with_padding_sorts_the_real_rows() -> None:
    lengths = np.concatenate([draw(200), np.full(56, 9000)])  # padding that is longer than any row
    is_padding = np.arange(256) >= 200
    steps = steps_of(planned(lengths, "sorted", is_padding=is_padding))
    real = [lengths[rows[~is_padding[rows]]] for rows in steps]
    assert all(before.min() >= after.max() for before, after in pairwise(real))


def test_the_configuration_knows_every_composition() -> None:
    for composition in ("keep", "stratified", "sorted"):
        assert EquipoiseConfig.from_node({"composition": composition}).composition == composition


def test_the_table_has_a_line_for_every_set_and_composition() -> None:
    lines = table(1)
    assert len(lines) == 2 + 3 * 3
    assert {line.count("|") for line in lines} == {8}
