"""``pack``: AReaL's contract, and how close to the fewest groups it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.planning.partition.pack import fewest_groups, packers

ALGORITHMS = sorted(packers)
optimize: Any = scipy.optimize  # its stubs are partial


def fewest_by_solver(lengths: list[int], capacity: int) -> int:
    """The exact least number of groups, from HiGHS."""
    n = len(lengths)
    groups = min(n, len(eq.pack(lengths, capacity=capacity, algorithm="ffd")))
    put = np.zeros((n, n * groups + groups))
    room = np.zeros((groups, n * groups + groups))
    for i in range(n):
        put[i, i * groups : (i + 1) * groups] = 1
        for g in range(groups):
            room[g, i * groups + g] = lengths[i]
    for g in range(groups):
        room[g, n * groups + g] = -capacity
    used = np.zeros(n * groups + groups)
    used[n * groups :] = 1
    constraints = [optimize.LinearConstraint(put, 1, 1), optimize.LinearConstraint(room, -np.inf, 0)]
    bounds = optimize.Bounds(0, 1)
    solved = optimize.milp(used, constraints=constraints, integrality=np.ones(used.size), bounds=bounds)
    assert solved.status == 0
    return round(solved.fun)


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=60),
    capacity=st.integers(200, 600),
    min_groups=st.integers(1, 12),
    multiple=st.integers(1, 5),
    algorithm=st.sampled_from(ALGORITHMS),
)
@settings(max_examples=150, deadline=None)
def test_the_contract_holds(lengths: list[int], capacity: int, min_groups: int, multiple: int, algorithm: str) -> None:
    arguments: dict[str, Any] = {"capacity": capacity, "min_groups": min_groups, "multiple": multiple}
    needed = len(eq.pack(lengths, capacity=capacity, algorithm="ffd"))
    if -(-max(min_groups, needed) // multiple) * multiple > len(lengths):
        # no algorithm can be counted on to do better than first fit here
        try:
            eq.pack(lengths, **arguments, algorithm=algorithm)
        except eq.InfeasiblePlan:
            return
    groups = eq.pack(lengths, **arguments, algorithm=algorithm)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert all(group.size and int(np.array(lengths)[group].sum()) <= capacity for group in groups)
    assert len(groups) >= min_groups
    assert len(groups) % multiple == 0
    again = eq.pack(np.array(lengths), **arguments, algorithm=algorithm)
    assert [a.tolist() for a in again] == [a.tolist() for a in groups]


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40), capacity=st.integers(100, 400))
@settings(max_examples=100, deadline=None)
def test_refined_takes_no_more_groups_than_the_others_and_no_fewer_than_the_bound(
    lengths: list[int], capacity: int
) -> None:
    count = {name: len(eq.pack(lengths, capacity=capacity, algorithm=name)) for name in ALGORITHMS}
    assert fewest_groups(np.array(lengths), capacity) <= count["refined"] <= min(count.values())


def test_refined_takes_the_fewest_groups_in_nearly_every_case() -> None:
    """Against the exact optimum on 60 cases of 8 to 16 rows."""
    draw = np.random.default_rng(5)
    fewest = 0
    for _ in range(60):
        lengths = draw.integers(20, 100, int(draw.integers(8, 17))).tolist()
        exact = fewest_by_solver(lengths, 200)
        assert fewest_groups(np.array(lengths), 200) <= exact
        fewest += len(eq.pack(lengths, capacity=200)) == exact
    assert fewest >= 57


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_group_of_four_stands_beside_groups_of_one(algorithm: str) -> None:
    """36 rows of 1000, capacity 4000, 16 groups: twos and threes."""
    sizes = sorted(len(g) for g in eq.pack([1000] * 36, capacity=4000, min_groups=16, algorithm=algorithm))
    assert sizes == [2] * 12 + [3] * 4


def test_refined_evens_out_the_weights_under_the_capacity() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(10, 400, 64)
    weights = eq.TransformerCost()(lengths)
    load = {
        name: max(
            float(weights[g].sum())
            for g in eq.pack(lengths, capacity=1500, min_groups=12, weights=weights, algorithm=name)
        )
        for name in ALGORITHMS
    }
    assert load["refined"] <= min(load.values())
    assert load["refined"] <= 1.005 * weights.sum() / 12


def test_an_oversized_row_is_refused_or_stands_alone() -> None:
    with pytest.raises(eq.InfeasiblePlan, match=r"lengths\[1\].*11"):
        eq.pack([3, 11, 4], capacity=10)
    for algorithm in ALGORITHMS:
        with pytest.warns(eq.EquipoiseWarning, match=r"lengths\[1\].*11"):
            groups = eq.pack([3, 11, 4, 3], capacity=10, oversize="alone", algorithm=algorithm)
        assert [1] in [g.tolist() for g in groups]
        assert len(groups) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": 0}, "capacity.*0"),
        ({"capacity": 10, "min_groups": 4}, "the number of groups must be at most the number of rows, 3"),
        ({"capacity": 10, "multiple": 4}, "the number of groups must be at most the number of rows, 3"),
        ({"capacity": 10, "weights": [1.0]}, "weights"),
        ({"capacity": 10, "oversize": "skip"}, "oversize"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(eq.InvalidInput, match=words):
        eq.pack([1, 2, 3], **arguments)


def test_an_unknown_algorithm_lists_the_known() -> None:
    with pytest.raises(LookupError, match="ffd, kk, refined"):
        eq.pack([1], capacity=1, algorithm="bfd")
