"""The cost model refitted to measured micro-batch times, and the clock that measures them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import equipoise as eq
from equipoise.trainer_hooks.on_verl.driver.refit import (
    MIN_CALLS,
    MeasuredCall,
    OnlineFit,
    measured_calls,
    relative_error,
    split_times,
)
from equipoise.trainer_hooks.on_verl.worker.clock import TimedMicroBatches

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
PER_CALL, LINEAR, QUADRATIC = 0.02, 3e-5, 4e-9


def law(lengths: Any) -> float:
    rows = np.asarray(lengths, dtype=np.float64)
    return PER_CALL + LINEAR * float(rows.sum()) + QUADRATIC * float((rows * rows).sum())


def call(rows: Any, seconds: float | None = None) -> MeasuredCall:
    lengths = np.asarray(rows, dtype=np.int64)
    return MeasuredCall(lengths=lengths, seconds=law(lengths) if seconds is None else seconds)


def drawn(seed: int, num_calls: int = MIN_CALLS) -> list[MeasuredCall]:
    draw = np.random.default_rng(seed)
    return [call(np.clip(draw.lognormal(6.5, 1.0, draw.integers(1, 9)), 2, 8192)) for _ in range(num_calls)]


def planned(seed: int = 0, **fields: Any) -> tuple[eq.StepPlan, IntArray]:
    lengths = np.clip(np.random.default_rng(seed).lognormal(6.5, 1.0, 96), 2, 8192).astype(np.int64)
    spec = eq.StepSpec(dp_size=4, num_mini_batches=3, max_token_len_per_gpu=9000, **fields)
    return eq.plan_step(lengths, spec), lengths


def sent(plan: eq.StepPlan, seconds: Callable[[int], FloatArray], epochs: int = 1) -> list[float]:
    """What the workers send: ``seconds(step)`` has shape (dp_size, micro-batches)."""
    out: list[float] = []
    for _ in range(epochs):
        for step in range(plan.num_mini_batches):
            for rank in seconds(step):
                out += [float(step), *rank]
    return out


def own_seconds(plan: eq.StepPlan, lengths: IntArray, step: int) -> FloatArray:
    return np.array([[law(lengths[m]) for m in plan.micro_batches(r)[step]] for r in range(plan.dp_size)])


# -- which rows explain a time -----------------------------------------------------------------------------------------


def test_a_column_is_its_slowest_time_and_the_rows_of_its_costliest_rank() -> None:
    plan, lengths = planned()

    def lockstep(step: int) -> FloatArray:  # every rank waits for the slowest, and its clock is a bit off
        own = own_seconds(plan, lengths, step)
        own[:] = own.max(axis=0)
        return own - 1e-4 * np.arange(4)[:, None]

    calls = measured_calls(sent(plan, lockstep), plan, lengths, eq.TransformerCost())
    assert calls is not None
    assert len(calls) == sum(sizes.shape[1] for sizes in plan.sizes)
    cells = [
        [plan.micro_batches(r)[step][c] for r in range(4)]
        for step in range(3)
        for c in range(plan.sizes[step].shape[1])
    ]
    for found, ranks in zip(calls, cells, strict=True):
        costs = [float(eq.TransformerCost()(lengths[rows]).sum()) for rows in ranks]
        assert found.lengths.tolist() == lengths[ranks[int(np.argmax(costs))]].tolist()
        assert found.seconds == pytest.approx(max(law(lengths[rows]) for rows in ranks), rel=1e-12)


def test_ranks_that_meet_once_a_step_have_times_of_their_own_but_in_the_last_column() -> None:
    plan, lengths = planned(objective="rank")

    def own_then_wait(step: int) -> FloatArray:
        own = own_seconds(plan, lengths, step)
        total = own.sum(axis=1)
        own[:, -1] += total.max() - total
        return own

    calls = measured_calls(sent(plan, own_then_wait), plan, lengths, eq.TransformerCost(LINEAR, QUADRATIC))
    assert calls is not None
    assert len(calls) == sum(4 * (sizes.shape[1] - 1) + 1 for sizes in plan.sizes)
    for found in calls:
        assert found.seconds == pytest.approx(law(found.lengths), rel=1e-9)


def test_epochs_measure_each_mini_batch_again() -> None:
    plan, lengths = planned()
    times = sent(plan, lambda step: own_seconds(plan, lengths, step), epochs=2)
    calls = measured_calls(times, plan, lengths, eq.TokenCost())
    assert calls is not None
    assert len(calls) == 2 * sum(sizes.shape[1] for sizes in plan.sizes)


@pytest.mark.parametrize("lost", ["all", "mini-batch", "rank", "epoch", "number"])
def test_an_update_in_which_the_workers_fell_back_is_not_used(lost: str) -> None:
    plan, lengths = planned()
    times = sent(plan, lambda step: own_seconds(plan, lengths, step), epochs=2 if lost == "epoch" else 1)
    first = plan.dp_size * (1 + plan.sizes[0].shape[1])
    cut = {
        "all": [],
        "mini-batch": times[first:],
        "rank": times[1 + plan.sizes[0].shape[1] :],
        "epoch": times[first:],
        "number": [3.0, *times[1:]],
    }
    assert split_times(times, plan) is not None
    assert split_times(cut[lost], plan) is None
    assert measured_calls(cut[lost], plan, lengths, eq.TokenCost()) is None


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_recovers_a_known_law_from_column_times_with_outliers() -> None:
    fit = OnlineFit(eq.TransformerCost(), window=8, min_r2=0.8)
    draw = np.random.default_rng(1)
    figures: dict[str, float] = {}
    for step in range(9):
        plan, lengths = planned(seed=step, algorithm="lpt", micro_batch_multiple=2)

        def column_times(step: int, plan: eq.StepPlan = plan, lengths: IntArray = lengths) -> FloatArray:
            own = own_seconds(plan, lengths, step)
            own[:] = own.max(axis=0) * draw.normal(1.0, 0.01, own.shape[1])
            own[:, draw.random(own.shape[1]) < 0.1] *= 6  # a stall
            return own

        calls = measured_calls(sent(plan, column_times), plan, lengths, fit.cost)
        figures = fit.observe(calls, fit.cost)
    assert isinstance(fit.cost, eq.FittedCost)
    assert fit.cost.num_outliers >= 3
    assert fit.cost.linear == pytest.approx(LINEAR, rel=0.05)
    assert fit.cost.quadratic == pytest.approx(QUADRATIC, rel=0.1)
    assert figures["equipoise/fit/r2"] > 0.98
    assert figures["equipoise/fit/error"] < 0.03


def test_the_first_update_is_left_out_and_the_next_step_is_planned_with_the_fit() -> None:
    model = eq.TransformerCost()
    fit = OnlineFit(model, window=8, min_r2=0.8)
    slow = [call(c.lengths, 10 * c.seconds) for c in drawn(0)]
    assert fit.observe(slow, fit.cost) == {"equipoise/fit/used": 0.0, "equipoise/fit/calls": 0.0}
    figures = fit.observe(drawn(1, MIN_CALLS - 1), fit.cost)
    assert figures == {"equipoise/fit/used": 0.0, "equipoise/fit/calls": MIN_CALLS - 1.0}
    assert fit.cost is model
    figures = fit.observe(drawn(2, 1), fit.cost)
    assert figures["equipoise/fit/used"] == 0.0  # this step was still planned with the model
    assert figures["equipoise/fit/r2"] == pytest.approx(1.0)
    assert isinstance(fit.cost, eq.FittedCost)
    assert fit.cost.linear == pytest.approx(LINEAR, rel=1e-6)
    figures = fit.observe(drawn(3), fit.cost)
    assert figures["equipoise/fit/used"] == 1.0
    assert figures["equipoise/fit/error"] < 1e-6


def test_a_poor_fit_falls_back_to_the_model_with_one_warning() -> None:
    heard: list[str] = []
    model = eq.TransformerCost()
    fit = OnlineFit(model, window=8, min_r2=0.8, warn=heard.append)
    draw = np.random.default_rng(0)
    figures: dict[str, float] = {}
    for step in range(4):
        figures = fit.observe([call(c.lengths, draw.lognormal(0, 0.5)) for c in drawn(step, 30)], fit.cost)
    assert fit.cost is model
    assert figures["equipoise/fit/r2"] < 0.8
    assert figures["equipoise/fit/used"] == 0.0
    (line,) = heard
    assert "below equipoise.fit_min_r2=0.8" in line
    for step in range(8):  # the noise leaves the window
        fit.observe(drawn(step), fit.cost)
    assert isinstance(fit.cost, eq.FittedCost)


@pytest.mark.parametrize("rows", [[700] * 4, [512]], ids=["several rows", "one row"])
def test_lengths_that_are_all_alike_fall_back(rows: list[int]) -> None:
    """Without noise r² is 1, and yet the split between a token's and a pair's time would be arbitrary."""
    heard: list[str] = []
    model = eq.TransformerCost()
    fit = OnlineFit(model, window=8, min_r2=0.0, warn=heard.append)
    counts = [rows * n for n in (1, 2, 3, 4, 5)] if len(rows) > 1 else [rows] * 5
    for _ in range(4):
        fit.observe([call(r) for r in counts], fit.cost)
    assert fit.cost is model
    assert len(heard) == 1
    assert "too similar" in heard[0]


def test_times_that_do_not_grow_with_the_tokens_fall_back() -> None:
    heard: list[str] = []
    fit = OnlineFit(eq.TokenCost(), window=8, min_r2=0.0, warn=heard.append)
    draw = np.random.default_rng(0)
    for seed in range(3):
        pairs = [float((c.lengths**2).sum()) for c in drawn(seed)]
        calls = [call(c.lengths, 1e-9 * n * draw.normal(1, 0.05)) for c, n in zip(drawn(seed), pairs, strict=True)]
        fit.observe(calls, fit.cost)
    assert isinstance(fit.cost, eq.TokenCost)
    assert len(heard) == 1
    assert "s, is within twice its standard error" in heard[0]


def test_the_window_slides() -> None:
    fit = OnlineFit(eq.TransformerCost(), window=3, min_r2=0.8)
    fit.observe(drawn(0), fit.cost)
    figures: dict[str, float] = {}
    for seed in range(4):
        figures = fit.observe([call(c.lengths, 3 * c.seconds) for c in drawn(seed, 10 + seed)], fit.cost)
    assert figures["equipoise/fit/calls"] == 11 + 12 + 13
    for seed in range(3):  # the machine is three times as fast from now on
        fit.observe(drawn(seed), fit.cost)
    assert isinstance(fit.cost, eq.FittedCost)
    assert fit.cost.linear == pytest.approx(LINEAR, rel=1e-6)


def test_updates_that_were_not_measured_leave_the_window_as_it_is_and_warn_once() -> None:
    heard: list[str] = []
    fit = OnlineFit(eq.TransformerCost(), window=3, min_r2=0.8, warn=heard.append)
    for seed in range(3):
        fit.observe(drawn(seed), fit.cost)
    before = fit.cost
    figures: dict[str, float] = {}
    for _ in range(5):
        figures = fit.observe(None, fit.cost)
    assert fit.cost == before
    assert figures["equipoise/fit/calls"] == 2 * MIN_CALLS
    assert "equipoise/fit/error" not in figures
    assert len(heard) == 1
    assert "sent no times" in heard[0]


def test_a_window_too_short_for_a_fit_is_said_once() -> None:
    heard: list[str] = []
    fit = OnlineFit(eq.TransformerCost(), window=2, min_r2=0.8, warn=heard.append)
    for seed in range(6):
        fit.observe(drawn(seed, 2), fit.cost)
    assert isinstance(fit.cost, eq.TransformerCost)
    assert len(heard) == 1
    assert "4 calls in 2 updates; raise equipoise.fit_window" in heard[0]


# -- the error ---------------------------------------------------------------------------------------------------------


def test_error_of_a_fit_by_hand() -> None:
    fitted = eq.FittedCost(linear=0.01, quadratic=0.0, per_call=1.0, r2=1.0, num_calls=9, num_outliers=0)
    calls = [call([100], 2.0), call([100, 100], 4.0), call([300], 5.0)]  # predicted 2, 3 and 4: off by 0, 1/4 and 1/5
    assert relative_error(calls, fitted, []) == pytest.approx(0.2)


def test_error_of_a_model_without_seconds_takes_its_unit_from_earlier_calls() -> None:
    earlier = [call([10], 1.0), call([10], 2.0), call([10], 9.0)]  # 0.2 s a token at the median
    calls = [call([10], 4.0), call([20], 5.0), call([30], 6.0)]  # predicted 2, 4 and 6: off by 1/2, 1/5 and 0
    assert relative_error(calls, eq.TokenCost(), earlier) == pytest.approx(0.2)
    assert relative_error(calls, eq.TokenCost(), []) is None


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_the_clock_times_what_happens_between_two_items() -> None:
    timed = TimedMicroBatches([0.03, 0.0, 0.06], step=0)
    for wait_s in timed:
        time.sleep(wait_s)
    seconds = timed.seconds()
    assert seconds is not None
    assert len(timed) == len(seconds) == 3
    assert seconds[0] >= 0.03
    assert seconds[2] >= 0.06
    assert seconds[1] < seconds[0]


class DeviceEvent:
    """A device's event: read only once it was reached, in milliseconds; each is recorded 250 ms after the last."""

    num_recorded = 0
    reached_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        type(self).num_recorded += 1
        self.at_ms = 250.0 * self.num_recorded

    def synchronize(self) -> None:
        type(self).reached_ms = self.at_ms

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert end.at_ms <= self.reached_ms, "not reached yet"
        return end.at_ms - self.at_ms


def test_the_clock_of_a_device_waits_for_the_last_event_and_tells_seconds() -> None:
    timed = TimedMicroBatches("abc", step=0, event=DeviceEvent)
    assert list(timed) == ["a", "b", "c"]
    assert timed.seconds() == [0.25, 0.25, 0.25]


def test_a_clock_that_was_not_run_once_and_to_the_end_tells_nothing() -> None:
    assert TimedMicroBatches([1, 2], step=0).seconds() is None
    cut = TimedMicroBatches([1, 2], step=0)
    next(iter(cut))
    assert cut.seconds() is None
    twice = TimedMicroBatches([1, 2], step=0)
    assert [*twice, *twice] == [1, 2, 1, 2]
    assert twice.seconds() is None
