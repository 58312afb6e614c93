"""``StepTime``: seconds of a decode step, fitted to measured steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import equipoise as eq


def measured(seed: int) -> tuple[list[int], list[int], list[float]]:
    draw = np.random.default_rng(seed)
    tier = draw.choice([4, 16, 64], 300)
    context = draw.integers(0, 100_000, 300)
    taken = (0.05 + 0.001 * tier + 1e-9 * tier * context) * draw.normal(1, 0.01, 300)
    taken[::10] *= 5  # stalls
    return tier.tolist(), context.tolist(), taken.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_lines_of_every_tier_despite_stalls(seed: int) -> None:
    model = eq.StepTime.fit(*measured(seed))
    for tier in (4, 16, 64):
        for context in (0, 50_000, 100_000):
            assert model(tier, context) == pytest.approx(0.05 + 0.001 * tier + 1e-9 * tier * context, rel=0.02)
    assert model.num_outliers >= 30
    assert model.r2 > 0.98


def test_between_tiers_below_and_above() -> None:
    model = eq.StepTime(tiers=(4, 8), base_s=(1.0, 2.0), s_per_token=(0.0, 0.0))
    assert [model(tier, 0) for tier in (2, 4, 6, 8, 16)] == [1.0, 1.0, 1.5, 2.0, 4.0]


def test_plans_take_it_as_it_is() -> None:
    model = eq.StepTime.fit(*measured(0))
    assert (
        len(eq.plan_rebalance([[eq.Request(i, 5, 5, expected_remaining=50.0) for i in range(20)], []], step_time=model))
        == 4
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([4, 4], [1, 2], [1.0, 1.0]), "steps of tier 4.*2"),
        (([4, 4, 4], [1, 2, 3], [1.0, 1.0]), "seconds"),
        (([4, 4, 4], [1, 2, 3], [1.0, 0.0, 1.0]), r"seconds\[1\]"),
        (([4, 4, 4], [1, -2, 3], [1.0, 1.0, 1.0]), r"context_tokens\[1\]"),
        (([4, 4, 4], [1, 2, 3], ["a", "b", "c"]), "seconds"),
        (([4, 4, 4], [1, 2, 3], None), "seconds"),
    ],
)
def test_refuses_what_it_cannot_fit(arguments: Any, text: str) -> None:
    with pytest.raises(eq.InvalidInput, match=text):
        eq.StepTime.fit(*arguments)


def test_refuses_tiers_that_do_not_rise_and_negative_times() -> None:
    for tiers in ((8, 4), (), (4, "8"), (0, 4), 5, None):
        wrong_tiers: Any = tiers
        with pytest.raises(eq.InvalidInput, match="tiers"):
            eq.StepTime(tiers=wrong_tiers, base_s=(1.0, 1.0), s_per_token=(0.0, 0.0))
    for base in ((1.0, -1.0), (1.0,), (1.0, "x"), None, 2.0):
        wrong_base: Any = base
        with pytest.raises(eq.InvalidInput, match="base_s"):
            eq.StepTime(tiers=(4, 8), base_s=wrong_base, s_per_token=(0.0, 0.0))
    with pytest.raises(eq.InvalidInput, match=r"most_tokens.*nan"):
        eq.StepTime(tiers=(4, 8), base_s=(1.0, 1.0), s_per_token=(0.0, 0.0), most_tokens=float("nan"))
