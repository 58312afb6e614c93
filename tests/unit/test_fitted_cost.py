"""Costs fitted to measured calls."""

from __future__ import annotations

import numpy as np
import pytest

import equipoise as eq

TRUTH = (0.02, 1e-5, 2e-9)


def calls(count: int, *, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(10, 4000, int(draw.integers(1, 9))).tolist() for _ in range(count)]


def seconds(rows: list[list[int]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    lengths = [np.array(row, dtype=np.float64) for row in rows]
    return np.array([TRUTH[0] + TRUTH[1] * a.sum() + TRUTH[2] * (a**2).sum() for a in lengths])


def test_exact_calls_give_the_exact_model() -> None:
    rows = calls(12)
    fitted = eq.FittedCost.fit(rows, seconds(rows))
    assert (fitted.per_call, fitted.linear, fitted.quadratic) == pytest.approx(TRUTH, rel=1e-6)
    assert fitted.r2 == pytest.approx(1.0)
    assert fitted.seconds(rows[0]) == pytest.approx(seconds(rows)[0])


@pytest.mark.parametrize("seed", range(5))
def test_outliers_have_no_say(seed: int) -> None:
    rows = calls(80, seed=seed)
    noisy = seconds(rows) * np.random.default_rng(seed).normal(1, 0.02, 80)
    noisy[::9] *= 8  # compilations, stalls
    fitted = eq.FittedCost.fit(rows, noisy)
    share = fitted([2000]) / (TRUTH[1] * 2000 + TRUTH[2] * 2000**2)
    assert float(share[0]) == pytest.approx(1.0, abs=0.05)
    assert fitted.num_outliers >= 8
    assert fitted.r2 > 0.98


def test_plain_least_squares_would_be_misled() -> None:
    """What the robust fit is for: with the same outliers the ordinary fit is far off."""
    rows = calls(80)
    noisy = seconds(rows)
    noisy[::9] *= 8
    features = np.array([[1.0, sum(row), sum(n * n for n in row)] for row in rows])
    ordinary = np.linalg.lstsq(features, noisy, rcond=None)[0]
    assert abs(ordinary @ [0, 2000, 2000**2] / (TRUTH[1] * 2000 + TRUTH[2] * 2000**2) - 1) > 0.3


def test_coefficients_are_never_negative() -> None:
    rows = [[n] for n in range(100, 3000, 100)]
    falling = [1.0 / n for n in range(100, 3000, 100)]
    fitted = eq.FittedCost.fit(rows, falling)
    assert min(fitted.linear, fitted.quadratic, fitted.per_call) >= 0


def test_noise_alone_is_told_by_r2() -> None:
    rows = calls(60)
    noise = np.random.default_rng(1).uniform(0.5, 1.5, 60)
    assert eq.FittedCost.fit(rows, noise).r2 < 0.3


def test_a_fitted_model_plans() -> None:
    rows = calls(40)
    fitted = eq.FittedCost.fit(rows, seconds(rows))
    lengths = np.random.default_rng(3).integers(10, 4000, 64)
    plan = eq.plan_step(lengths, eq.StepSpec(dp_size=4, max_token_len_per_gpu=20000), cost=fitted)
    assert plan.stats.lockstep_cost <= plan.incoming.lockstep_cost


def test_bad_measurements_are_refused() -> None:
    with pytest.raises(eq.InvalidInput, match=r"row_lengths_per_call.*3"):
        eq.FittedCost.fit([[1], [2]], [1.0, 2.0])
    with pytest.raises(eq.InvalidInput, match=r"seconds\[1\].*nan"):
        eq.FittedCost.fit([[1], [2], [3]], [1.0, float("nan"), 2.0])
    with pytest.raises(eq.InvalidInput, match=r"seconds.*3"):
        eq.FittedCost.fit([[1], [2], [3]], [1.0])
    with pytest.raises(eq.InvalidInput, match=r"row_lengths_per_call\[2\]\[0\]"):
        eq.FittedCost.fit([[1], [2], [-3]], [1.0, 1.0, 1.0])


def test_a_fit_in_which_tokens_take_no_time_does_not_plan() -> None:
    fit = eq.FittedCost.fit([[100], [200], [300], [400]], [4.0, 3.0, 2.0, 1.0])
    assert fit.seconds([100]) == pytest.approx(2.5)
    with pytest.raises(eq.InvalidInput, match="FittedCost"):
        fit([100])
