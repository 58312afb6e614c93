"""What ``partition`` must satisfy, always, and how near it comes to the optimum of small cases."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise import InfeasiblePlan, InvalidInput, partition, partitioners
from equipoise.errors import UnknownName

QUICK = settings(max_examples=150, deadline=None, derandomize=True)
RULES = ("kk", "lpt", "refined")
WEIGHTS = st.one_of(
    st.integers(0, 20).map(float),
    st.floats(0, 1e15, allow_nan=False),
    st.sampled_from([0.0, 1.0, 1e12]),
)


def loads(weights: Sequence[float], parts: list[Any]) -> list[float]:
    return [float(np.asarray(weights)[part].sum()) for part in parts]


def check_partition(weights: Sequence[float], k: int, parts: list[Any], *, equal_size: bool = False) -> None:
    assert len(parts) == k
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(weights))), "each row once"
    assert all(part.size for part in parts), "no part is empty"
    for part in parts:
        assert part.tolist() == sorted(part.tolist()), "rows rise within a part"
    if equal_size:
        assert {part.size for part in parts} == {len(weights) // k}


def optimum(weights: Sequence[float], k: int, *, equal_size: bool) -> float:
    """The least possible largest load, by trying everything."""
    rows = sorted(weights, reverse=True)
    most = len(rows) // k if equal_size else len(rows)

    @functools.cache
    def best(at: int, parts: tuple[tuple[float, int], ...]) -> float:
        if at == len(rows):
            return max(load for load, _ in parts)
        tried = {
            tuple(sorted((*parts[:i], (load + rows[at], size + 1), *parts[i + 1 :])))
            for i, (load, size) in enumerate(parts)
            if size < most
        }
        return min(best(at + 1, parts) for parts in tried)

    return best(0, ((0.0, 0),) * k)


@QUICK
@given(st.data(), st.sampled_from(RULES), st.lists(WEIGHTS, min_size=1, max_size=60))
def test_each_row_is_in_one_part_and_no_part_is_empty(data: st.DataObject, rule: str, weights: list[float]) -> None:
    k = data.draw(st.integers(1, len(weights)))
    check_partition(weights, k, partition(weights, k, algorithm=rule))


@QUICK
@given(st.data(), st.sampled_from(RULES), st.integers(1, 8), st.integers(1, 10))
def test_parts_of_equal_size(data: st.DataObject, rule: str, k: int, rows: int) -> None:
    weights = data.draw(st.lists(WEIGHTS, min_size=k * rows, max_size=k * rows))
    check_partition(weights, k, partition(weights, k, algorithm=rule, equal_size=True), equal_size=True)


@QUICK
@given(st.data(), st.sampled_from(RULES), st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_groups_stay_whole(data: st.DataObject, rule: str, group_ids: list[int]) -> None:
    weights = data.draw(st.lists(WEIGHTS, min_size=len(group_ids), max_size=len(group_ids)))
    k = data.draw(st.integers(1, len(set(group_ids))))
    parts = partition(weights, k, algorithm=rule, group_ids=[f"uid {i}" for i in group_ids])
    check_partition(weights, k, parts)
    homes: dict[int, set[int]] = defaultdict(set)
    for p, part in enumerate(parts):
        for row in part.tolist():
            homes[group_ids[row]].add(p)
    assert all(len(home) == 1 for home in homes.values())


@QUICK
@given(st.sampled_from(RULES), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_groups_of_one_size_in_parts_of_equal_size(rule: str, k: int, groups: int, size: int, random: Any) -> None:
    group_ids = [g for g in range(k * groups) for _ in range(size)]
    random.shuffle(group_ids)
    weights = [float(random.randrange(100)) for _ in group_ids]
    parts = partition(weights, k, algorithm=rule, equal_size=True, group_ids=group_ids)
    check_partition(weights, k, parts, equal_size=True)
    for part in parts:
        kept: set[int] = {group_ids[row] for row in part.tolist()}
        assert len(kept) == groups


@QUICK
@given(st.data(), st.booleans(), st.integers(1, 6), st.integers(1, 8))
def test_refined_is_never_worse_than_the_rules_it_starts_from(
    data: st.DataObject, equal_size: bool, k: int, rows: int
) -> None:
    weights = data.draw(st.lists(WEIGHTS, min_size=k * rows, max_size=k * rows))
    refined, *rules = (
        max(loads(weights, partition(weights, k, algorithm=rule, equal_size=equal_size)))
        for rule in ("refined", "kk", "lpt")
    )
    assert refined <= min(rules) * (1 + 1e-12)


@pytest.mark.parametrize("equal_size", [False, True])
def test_refined_is_near_the_optimum_of_small_cases(equal_size: bool) -> None:
    draw = np.random.default_rng(5)
    ratios: list[float] = []
    for _ in range(150):
        k = int(draw.integers(2, 4))
        n = k * int(draw.integers(2, 4))
        weights = [float(w) for w in draw.lognormal(6.5, 1.0, n)]
        parts = partition(weights, k, equal_size=equal_size)
        ratios.append(max(loads(weights, parts)) / optimum(weights, k, equal_size=equal_size))
    assert min(ratios) >= 1 - 1e-12, "nothing beats the optimum"
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.9, "the optimum itself in nine cases of ten"
    assert max(ratios) < 1.1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("equal_size", [False, True])
def test_rows_of_weight_zero_are_shared_out_too(rule: str, equal_size: bool) -> None:
    check_partition([0.0] * 6, 3, partition([0] * 6, 3, algorithm=rule, equal_size=equal_size), equal_size=equal_size)
    weights = [7.0, 0.0, 0.0, 0.0]
    check_partition(weights, 4, partition(weights, 4, algorithm=rule))


def test_the_order_of_equal_rows_does_not_matter_for_the_loads() -> None:
    weights = [5.0, 1.0, 4.0, 2.0, 3.0, 3.0]
    one = sorted(loads(weights, partition(weights, 3)))
    assert one == sorted(loads(weights[::-1], partition(weights[::-1], 3))) == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("rule", RULES)
def test_many_rows_of_one_part_stay_within_memory(rule: str) -> None:
    weights = np.arange(20_000) % 50 + 1
    weights[7] = 600_000
    parts = partition(weights, 2, algorithm=rule, equal_size=True)
    check_partition(weights.tolist(), 2, parts, equal_size=True)


@pytest.mark.parametrize(
    ("weights", "k", "options", "text"),
    [
        ([1, 2], 3, {}, r"^k .*2.*3"),
        ([1, 2], 0, {}, r"^k .*0"),
        ([1, 2], True, {}, r"^k .*True"),
        ([1, 2], 1.5, {}, r"^k .*1.5"),
        ([], 1, {}, r"weights"),
        ([[1, 2]], 1, {}, r"weights"),
        ([[1], [1, 2]], 1, {}, r"weights"),
        (["a"], 1, {}, r"weights"),
        ([1, 2], 1, {"group_ids": [[1], [1, 2]]}, r"group_ids"),
        ([1.0, float("nan")], 1, {}, r"weights\[1\].*nan"),
        ([1.0, float("inf")], 1, {}, r"weights\[1\]"),
        ([1.0, -2.0], 1, {}, r"weights\[1\].*-2.0"),
        ([1, 2, 3], 2, {"group_ids": [1, 1]}, r"group_ids.*\(2,\)"),
    ],
)
def test_rejects_bad_input(weights: Any, k: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        partition(weights, k, **options)


def test_unequal_parts_name_the_rows_that_would_do() -> None:
    with pytest.raises(InfeasiblePlan, match=r"multiple of k = 2 with equal_size=True, got 3; pad to 4 rows"):
        partition([1, 2, 3], 2, equal_size=True)
    partition([1, 2, 3, 0], 2, equal_size=True)
    partition([1, 2, 3], 2, equal_size=False)


def test_groups_that_cannot_stay_whole_are_infeasible() -> None:
    with pytest.raises(InfeasiblePlan, match=r"^k .*2.*3"):
        partition([1, 2, 3, 4], 3, group_ids=[0, 0, 1, 1])
    with pytest.raises(InfeasiblePlan, match=r"group_ids"):
        partition([1, 2, 3, 4], 2, equal_size=True, group_ids=[0, 0, 0, 1])


def test_a_partitioner_that_leaves_a_part_empty_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(weights: npt.NDArray[np.float64], k: int, *, equal_size: bool) -> npt.NDArray[np.int64]:
        return np.zeros(weights.size, dtype=np.int64)

    monkeypatch.setitem(vars(partitioners)["_items"], "lazy", lazy)
    with pytest.raises(InvalidInput, match=r"partitioner 'lazy'.*\[3, 0\]"):
        partition([1, 2, 3], 2, algorithm="lazy")


def test_an_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"must be one of \[kk, lpt, refined.*\], got 'kkk'"):
        partition([1], 1, algorithm="kkk")
    assert set(RULES) <= set(partitioners)
