"""Real FSDP2 workers of verl on two gloo ranks: the plan changes micro-batches, and nothing else.

Float32 tolerances: losses and gradient norms 2e-6 relative, weights after SGD steps at learning rate 0.1 1e-7 absolute
(their gradients are of order 0.1, so that a lost or doubled token would show at 1e-4).
"""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.trainer_hooks.on_verl.driver.refit import split_times
from tests.integration import engine_rig
from tests.integration.family import run_patiently
from tests.integration.verl_rig import tiny

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of one run of the rig left what they saw."""
    out = tmp_path_factory.mktemp("rig") / "out"
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.engine_rig", str(tiny().model), str(out)]
    env = {**os.environ, "VERL_PLATFORM": "cpu", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    run_patiently(command, cwd=ROOT, env=env)
    return out


@pytest.fixture(scope="module")
def ranks(rig: Path) -> list[dict[str, Any]]:
    return [torch.load(f"{rig}.2.{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(rig: Path) -> dict[str, Any]:
    return torch.load(f"{rig}.1.0.pt", weights_only=False)


def widest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_update_runs_the_planned_micro_batches(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["update/plan"]["micro_batches"] == rank["plan/rows"]
        assert rank["update/plan"]["warnings"] == []
    assert any(r["update/plan"]["micro_batches"] != r["update/verl"]["micro_batches"] for r in ranks)


def test_loss_gradient_and_weights_do_not_depend_on_who_made_the_micro_batches(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plan, verl = rank["update/plan"], rank["update/verl"]
        np.testing.assert_allclose(plan["loss"], verl["loss"], rtol=2e-6)
        np.testing.assert_allclose(plan["grad_norm"], verl["grad_norm"], rtol=2e-6)
        assert widest(plan["weights"], verl["weights"]) < 1e-7


def test_fixed_micro_batches_are_the_planned_ones(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ran = [m for call in rank["fixed/plan"]["micro_batches"] for m in call]
        assert ran == rank["fixed/rows"]
        assert rank["fixed/plan"]["warnings"] == []


@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_neither_loss_nor_gradient(
    ranks: list[dict[str, Any]], alone: dict[str, Any], mode: str
) -> None:
    """Seven real rows and one padding row on two ranks against the seven rows alone on one process."""
    padded, real = ranks[0][f"padded/{mode}"], alone[f"alone/{mode}"]
    np.testing.assert_allclose(padded["pg_loss"], real["pg_loss"], rtol=2e-6)
    np.testing.assert_allclose(padded["grad_norm"], real["grad_norm"], rtol=2e-6)
    assert widest(padded["weights"], real["weights"]) < 1e-7 * (40 if mode == "seq-mean-token-sum" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_an_exact_loss_trains_as_verls_does(ranks: list[dict[str, Any]], mode: str) -> None:
    exact, verls = ranks[0][f"exact/{mode}"], ranks[0][f"padded/{mode}"]
    np.testing.assert_allclose(exact["pg_loss"], verls["pg_loss"], rtol=2e-6)
    np.testing.assert_allclose(exact["grad_norm"], verls["grad_norm"], rtol=2e-6)
    assert widest(exact["weights"], verls["weights"]) < 1e-7 * (40 if mode == "seq-mean-token-sum" else 1)


def test_nan_under_the_mask_reaches_no_weight_with_an_exact_loss(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        zeros, nans = rank["masked/0.0"], rank["masked/nan"]
        assert nans["grad_norm"] == zeros["grad_norm"]
        assert widest(nans["weights"], zeros["weights"]) == 0.0
        assert widest(zeros["weights"], rank["padded/token-mean"]["weights"]) > 1e-6


def test_outputs_of_a_pass_come_back_in_the_order_of_its_rows(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name in ("log_probs", "entropy"):
            for planned, verl in zip(rank["infer/plan"][name], rank["infer/verl"][name], strict=True):
                # a row's last value predicts the first token of the next row in the pack; verl drops it
                torch.testing.assert_close(planned[:-1], verl[:-1], rtol=0, atol=2e-6)
        assert rank["infer/plan"]["micro_batches"] != rank["infer/verl"]["micro_batches"]


def test_a_plan_adds_no_collective_and_spares_the_count_agreement(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for stage in ("update", "infer"):
            with_plan, without = rank[f"{stage}/plan"]["collectives"], rank[f"{stage}/verl"]["collectives"]
            assert sum(with_plan.values()) < sum(without.values())
            assert with_plan["all_reduce"] < without["all_reduce"]
            # a pass votes on its plan in one small all-gather
            assert with_plan.get("all_gather", 0) - without.get("all_gather", 0) == (stage == "infer")


def test_each_planned_micro_batch_is_timed_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """The times come with the metrics that verl gathers; the counts of collectives above are those of timed runs."""
    plans = {
        "update/plan": engine_rig.planned(engine_rig.LENGTHS, 2, steps=2)[0],
        "fixed/plan": engine_rig.planned(engine_rig.LENGTHS, 2, steps=2, cap=None, micro_rows=2)[0],
    }
    for name, plan in plans.items():
        times = ranks[0][name]["seconds"]
        assert ranks[1][name]["seconds"] == times
        found = split_times(times, plan)
        assert found is not None
        assert [step for step, _ in found] == [0, 1]
        for rank in range(2):
            seconds = np.concatenate([block[rank] for _, block in found])
            assert (seconds > 0).all()
            assert seconds.sum() < ranks[rank][name]["wall_s"]


def test_updates_that_do_not_run_the_plan_are_not_taken_for_measured(ranks: list[dict[str, Any]]) -> None:
    plan = engine_rig.planned(engine_rig.LENGTHS, 2, steps=2)[0]
    for rank in ranks:
        for name in ("update/verl", "padded/token-mean"):
            assert rank[name]["seconds"] is None
        for name in ("strange/update", "small_cap"):
            second = rank[name]["seconds"]  # the first mini-batch fell back, the other one was as planned
            assert second[0] == 1.0
            assert split_times(second, plan) is None


def test_all_ranks_fall_back_alike_when_one_holds_other_rows(ranks: list[dict[str, Any]]) -> None:
    for case in ("strange/update", "strange/infer"):
        for rank in ranks:
            assert len(rank[case]["warnings"]) == 1
            assert "on all ranks" in rank[case]["warnings"][0]
        counts = {tuple(len(call) for call in rank[case]["micro_batches"]) for rank in ranks}
        assert len(counts) == 1


def test_an_engine_with_a_smaller_cap_is_obeyed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "above the engine's cap of 312" in rank["small_cap"]["warnings"][0]
        assert max(sum(m) for call in rank["small_cap"]["micro_batches"] for m in call) <= 312
    assert engine_rig.CAP > 312
