"""How good plans are on drawn and on real lengths: near the bound, fast, and never worse than verl's."""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.metadata
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.verl_rule import lockstep_cost, verl_micro_batches
from equipoise import StepPlan, StepSpec, plan_step
from tests.plan_checker import check_plan

IntArray = npt.NDArray[np.int64]

NUM_ROWS, DP_SIZE, NUM_MINI_BATCHES = 2048, 32, 4
TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def _log_normal(draw: np.random.Generator) -> IntArray:
    return np.clip(draw.lognormal(6.5, 1.0, NUM_ROWS), 1, 8192).astype(np.int64)


def _bimodal(draw: np.random.Generator) -> IntArray:
    short, long = draw.integers(50, 201, NUM_ROWS), draw.integers(800, 2049, NUM_ROWS)
    return np.where(draw.random(NUM_ROWS) < 0.7, short, long)


def _thinking(draw: np.random.Generator) -> IntArray:
    return np.clip(draw.lognormal(8.3, 1.0, NUM_ROWS) + 200, 1, 32768).astype(np.int64)


def _trace(draw: np.random.Generator, name: str) -> IntArray:
    path = TRACES / f"azure_llm_2023_{name}.csv"
    if not path.exists():
        pytest.skip(f"the trace is not there: {path}")
    with path.open() as lines:
        tokens = [int(row["prompt_len"]) + int(row["response_len"]) for row in csv.DictReader(lines)]
    return draw.choice(np.array(tokens), NUM_ROWS, replace=len(tokens) < NUM_ROWS)


LENGTHS: dict[str, Callable[[np.random.Generator], IntArray]] = {
    "log-normal": _log_normal,
    "bimodal": _bimodal,
    "thinking": _thinking,
    "code": functools.partial(_trace, name="code"),
    "conv": functools.partial(_trace, name="conv"),
}


@functools.cache
def _planned(name: str, seed: int) -> tuple[IntArray, StepPlan, float]:
    """Lengths, their plan, and the shortest time of three runs in seconds of this process."""
    lengths = LENGTHS[name](np.random.default_rng(seed))
    spec = StepSpec(
        dp_size=DP_SIZE,
        num_mini_batches=NUM_MINI_BATCHES,
        max_token_len_per_gpu=max(32768, 2 * int(lengths.max())),
    )
    times: list[float] = []
    plans: list[StepPlan] = []
    for _ in range(3):
        start = time.process_time()
        plans.append(plan_step(lengths, spec))
        times.append(time.process_time() - start)
    return lengths, plans[0], min(times)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_lockstep_cost_is_within_5_percent_of_the_bound(name: str, seed: int) -> None:
    lengths, plan, _ = _planned(name, seed)
    figures = check_plan(plan, lengths.tolist(), plan.spec)
    assert figures.lockstep_cost <= 1.05 * figures.bound


@pytest.mark.parametrize("name", LENGTHS)
def test_under_the_tightest_cap_plans_are_near_the_bound_in_few_micro_batches(name: str) -> None:
    lengths = LENGTHS[name](np.random.default_rng(0))
    cap = int(lengths.max())
    plan = plan_step(lengths, StepSpec(dp_size=DP_SIZE, num_mini_batches=NUM_MINI_BATCHES, max_token_len_per_gpu=cap))
    figures = check_plan(plan, lengths.tolist(), plan.spec)
    assert figures.lockstep_cost <= 1.12 * figures.bound
    assert plan.stats.efficiency >= 0.975  # against the bound that knows the cap
    fewest = [-(-int(tokens.sum()) // (DP_SIZE * cap)) for tokens in np.split(lengths, NUM_MINI_BATCHES)]
    assert plan.stats.num_micro_batches <= sum(fewest) + 2


@pytest.mark.parametrize("name", LENGTHS)
def test_a_plan_takes_milliseconds(name: str) -> None:
    """10 to 40 ms here when quiet; the limit leaves room for a busy machine."""
    assert _planned(name, 0)[2] <= 0.15


@pytest.mark.parametrize("name", LENGTHS)
def test_a_plan_never_costs_more_than_that_of_verl(name: str) -> None:
    lengths, plan, _ = _planned(name, 0)
    cap = plan.spec.max_token_len_per_gpu or 0
    theirs = verl_micro_batches(lengths.tolist(), dp_size=DP_SIZE, num_mini_batches=NUM_MINI_BATCHES, max_token_len=cap)
    cost = lockstep_cost(theirs, lengths.tolist(), linear=24576.0, quadratic=1.0)
    assert plan.stats.lockstep_cost <= cost
    assert plan.stats.num_micro_batches <= sum(len(step) for step in theirs[0])


def test_the_functions_of_the_installed_verl_are_what_plans_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    verl: Any = importlib.import_module("verl.utils.seqlen_balancing")
    assert Path(verl.__file__).is_relative_to(Path(sysconfig.get_paths()["purelib"]))
    assert importlib.metadata.version("verl") == "0.9.1"
    called: list[str] = []

    def spy(name: str) -> None:
        function = getattr(verl, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(verl, name, call)

    for name in ("calculate_workload", "get_seqlen_balanced_partitions", "rearrange_micro_batches"):
        spy(name)
    verl_micro_batches([5, 4, 3, 2], dp_size=2, num_mini_batches=1, max_token_len=7)
    assert {"calculate_workload", "get_seqlen_balanced_partitions", "rearrange_micro_batches"} <= set(called)
