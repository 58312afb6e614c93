"""Costs are exact, whatever holds the lengths, and bad lengths are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from equipoise import InvalidInput, StepSpec, TokenCost, TransformerCost, plan_step
from equipoise.planning.workload import as_lengths, row_costs

LONG = [0, 1, 35_654, 35_655, 35_656, 46_341, 65_536, 92_682, 131_072, 262_144, 999_999, 1_000_000]


def test_costs_are_those_of_whole_numbers() -> None:
    exact = [24576 * length + length * length for length in LONG]
    assert [int(cost) for cost in TransformerCost()(LONG).tolist()] == exact
    assert max(exact) < 2**53, "all of them are whole numbers in float64"


KINDS: dict[str, Any] = {
    "list": LONG,
    "tuple": tuple(LONG),
    "int32": np.array(LONG, dtype=np.int32),
    "uint32": np.array(LONG, dtype=np.uint32),
    "int64": np.array(LONG, dtype=np.int64),
    "float64": np.array(LONG, dtype=np.float64),
    "int32 tensor": torch.tensor(LONG, dtype=torch.int32),
    "int64 tensor": torch.tensor(LONG, dtype=torch.int64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_lengths_costs_the_same(kind: str) -> None:
    for cost in (TransformerCost(), TransformerCost(linear=6144.0), TokenCost()):
        assert cost(KINDS[kind]).dtype == np.float64
        assert cost(KINDS[kind]).tolist() == cost(LONG).tolist()


def test_token_cost_is_the_tokens() -> None:
    assert TokenCost()(LONG).tolist() == [float(length) for length in LONG]


def test_lengths_are_not_changed() -> None:
    lengths = np.array([3, 1, 2])
    plan_step(np.append(lengths, 5), StepSpec(dp_size=2))
    TransformerCost()(lengths)
    assert lengths.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([], r"lengths.*\[\]"),
        (5, r"lengths.*\(\)"),
        (None, r"lengths"),
        ([[1, 2], [3, 4]], r"lengths.*\(2, 2\)"),
        ([[1], [2, 3]], r"lengths.*'list'"),
        (["a"], r"lengths.*'<U1'"),
        ([True, False], r"lengths.*'bool'"),
        ([None, 1], r"lengths.*'object'"),
        ([1, 2**70], r"lengths.*'object'"),
        ([1.5], r"lengths\[0\].*1.5"),
        ([1.0, float("nan")], r"lengths\[1\].*nan"),
        ([1.0, float("inf")], r"lengths\[1\].*inf"),
        ([1, -2], r"lengths\[1\].*-2"),
        ([1, 2**41], r"lengths\[1\].*2199023255552"),
        ([1.0, 1e300], r"lengths\[1\] must be at most 1099511627776"),
        (np.array([2**64 - 1], dtype=np.uint64), r"lengths\[0\] must be at most 1099511627776"),
        (torch.tensor([1.0], requires_grad=True), r"lengths"),
        (torch.tensor([1.0], dtype=torch.bfloat16), r"lengths"),
    ],
)
def test_bad_lengths_are_named(lengths: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        as_lengths(lengths)
    with pytest.raises(InvalidInput, match=text):
        plan_step(lengths, StepSpec(dp_size=1))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"linear": -1.0}, r"linear.*-1.0"),
        ({"quadratic": float("nan")}, r"quadratic.*nan"),
        ({"linear": 0.0, "quadratic": 0.0}, r"linear must be above 0 when quadratic is 0"),
    ],
)
def test_coefficients_that_break_their_rule_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        TransformerCost(**settings)


class _Model:
    """A cost model that returns what it is given."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __call__(self, lengths: Any) -> Any:
        return self.values


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0], r"_Model\(lengths\).*\(1,\)"),
        ([1.0, float("nan")], r"_Model\(lengths\)\[1\].*nan"),
        ([1.0, float("inf")], r"_Model\(lengths\)\[1\]"),
        ([-1.0, 1.0], r"_Model\(lengths\)\[0\].*-1.0"),
    ],
)
def test_a_cost_model_that_returns_nonsense_is_named(values: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        row_costs(_Model(values), as_lengths([8, 9]))
    with pytest.raises(InvalidInput, match=text):
        plan_step([8, 9], StepSpec(dp_size=2), cost=_Model(values))


def test_a_model_of_ones_own_decides_the_plan() -> None:
    plan = plan_step([1, 2, 3, 4], StepSpec(dp_size=2), cost=_Model([8.0, 8.0, 0.0, 0.0]))
    assert plan.stats.lockstep_cost == plan.stats.bound == 8.0
