"""verl's own trainer class and TransferQueue: what the hook does on the driver, and what it refuses."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.driver_rig import LENGTHS
from tests.integration.family import run_patiently

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("driver") / "out.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.driver_rig", str(out)]
    env = {**os.environ, "VERL_PLATFORM": "cpu", "TQ_NUM_THREADS": "2", "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    run_patiently(command, cwd=ROOT, env=env)
    results = json.loads(out.read_text())
    crashed = {name: r["result"]["crashed"] for name, r in results.items() if "crashed" in (r["result"] or {})}
    assert not crashed, "\n".join(f"{name}: {text}" for name, text in crashed.items())
    return results


def steps_of(batch: dict[str, Any], wire: dict[str, Any]) -> list[list[int]]:
    """Row places of each mini-batch, over all ranks, from what the workers are told."""
    steps: list[list[int]] = [[] for _ in range(wire["steps"])]
    at = 0
    for rank in range(wire["dp"]):
        for step in range(wire["steps"]):
            rows = sum(wire["sizes"][step][rank])
            steps[step] += range(at, at + rows)
            at += rows
    assert at == len(batch["keys"])
    return steps


def test_a11_the_batch_is_padded_with_the_fewest_tokens_and_loses_no_row(rig: dict[str, Any]) -> None:
    result = rig["padded_and_planned"]["result"]
    batch = result["batch"]
    assert len(batch["keys"]) == 32
    assert sum(batch["padding"]) == 2
    real = [n for n, pad in zip(batch["lengths"], batch["padding"], strict=True) if not pad]
    assert Counter(real) == Counter(LENGTHS)
    assert result["pad_ids"] == [[2, 2], [2, 2]]
    assert result["pad_masks"] == [[0], [0]]


def test_d1_padding_has_a_uid_of_its_own(rig: dict[str, Any]) -> None:
    result = rig["padded_and_planned"]["result"]
    real = {
        key.split("_")[0]
        for key, pad in zip(result["batch"]["keys"], result["batch"]["padding"], strict=True)
        if not pad
    }
    assert not real & set(result["pad_uids"])


def test_the_update_gets_the_plan_of_the_order_it_runs_in(rig: dict[str, Any]) -> None:
    result = rig["padded_and_planned"]["result"]
    (sent,) = result["sent"]
    assert sent["keys"] == result["batch"]["keys"]
    assert sent["wire"]["dp"] == 4
    assert sent["wire"]["steps"] == 4
    steps = steps_of(result["batch"], sent["wire"])
    assert [len(rows) for rows in steps] == [8] * 4
    real = [sum(not result["batch"]["padding"][row] for row in rows) for rows in steps]
    assert real == sent["wire"]["real"]
    assert min(real) >= 1


def test_rollouts_of_a_prompt_stay_in_one_optimizer_step(rig: dict[str, Any]) -> None:
    result = rig["padded_and_planned"]["result"]
    keys = result["batch"]["keys"]
    for rows in steps_of(result["batch"], result["sent"][0]["wire"]):
        whole = Counter(keys[row].split("_")[0] for row in rows if not result["batch"]["padding"][row])
        # padding is spread, which can cut one prompt at each border
        assert sum(count == 1 for count in whole.values()) <= 2


def test_verls_length_metrics_are_kept_and_the_plans_added(rig: dict[str, Any]) -> None:
    metrics = rig["padded_and_planned"]["result"]["metrics"]
    for name in ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean"):
        assert f"global_seqlen/{name}" in metrics
    total = sum(LENGTHS) + 2 * 2
    assert metrics["global_seqlen/mean"] == total / 4
    assert 1.0 <= metrics["equipoise/lockstep_over_bound"] <= metrics["equipoise/lockstep_over_bound_incoming"]
    assert metrics["equipoise/max_tokens"] <= 600
    assert metrics["equipoise/plan_seconds"] > 0


def test_h4_actor_and_critic_each_get_a_plan_with_their_own_number_of_steps(rig: dict[str, Any]) -> None:
    result = rig["actor_and_critic_differ"]["result"]
    (critic,), (actor,) = result["critic"], result["actor"]
    assert critic["wire"]["steps"] == 2  # 32 rows, 8 prompts × 2
    assert actor["wire"]["steps"] == 4  # 32 rows, 4 prompts × 2
    assert sorted(critic["keys"]) == sorted(actor["keys"])
    assert critic["keys"] != actor["keys"]
    assert "equipoise_plan" not in result["left"]
    assert "equipoise/critic/lockstep_over_bound" in result["metrics"]


def test_critic_warmup_plans_for_the_critic_alone(rig: dict[str, Any]) -> None:
    batch = rig["critic_warmup"]["result"]
    assert len(batch["keys"]) == 20  # a multiple of 5 prompts × 2, not of the actor's 4 × 2


def test_a5_the_batch_is_a_multiple_of_both_mini_batches(rig: dict[str, Any]) -> None:
    assert len(rig["a5"]["result"]["keys"]) == 768


def test_h1_without_balancing_nothing_is_reordered_and_padding_still_happens(rig: dict[str, Any]) -> None:
    result = rig["not_balanced"]["result"]
    before, after = result["before"], result["batch"]["keys"]
    assert after[: len(before)] == before
    assert len(after) == 32
    (sent,) = result["sent"]
    assert sent["keys"] == after
    assert sent["wire"]["sizes"] is None  # verl makes the micro-batches
    assert sum(sent["wire"]["real"]) == 30  # but the loss still counts real rows
    assert "global_seqlen/mean" in result["metrics"]


def test_preset_off_attaches_nothing(rig: dict[str, Any]) -> None:
    result = rig["switched_off"]
    assert result["heard"] == []
    assert result["result"]["own_methods"] == []
    assert not any(name.startswith("equipoise") for name in result["result"]["metrics"])


def test_preset_verl_measures_verls_own_order(rig: dict[str, Any]) -> None:
    result = rig["measured_only"]["result"]
    assert result["method"]
    assert Counter(result["batch"]["lengths"]) == Counter(rig["switched_off"]["result"]["batch"]["lengths"])
    assert result["batch"]["lengths"] == rig["switched_off"]["result"]["batch"]["lengths"]
    assert result["metrics"]["equipoise/rank_over_bound"] >= 1.0


def test_one_info_line_says_what_is_attached(rig: dict[str, Any]) -> None:
    lines = [line for line in rig["padded_and_planned"]["heard"] if line.startswith("INFO")]
    assert len(lines) == 1
    assert "plans each step of PPOTrainerSync" in lines[0]
    assert "critic" not in lines[0]


def test_shuffling_in_the_workers_is_left_to_verl_with_one_warning(rig: dict[str, Any]) -> None:
    scenario = rig["shuffled"]
    assert scenario["result"]["sent"][0]["wire"] is None
    warnings = [line for line in scenario["heard"] if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "actor.shuffle=True" in warnings[0]


def test_rows_filtered_after_balancing_are_planned_anew(rig: dict[str, Any]) -> None:
    (sent,) = rig["filtered_rows"]["result"]
    assert len(sent["keys"]) == 16
    assert sent["wire"]["steps"] == 2


def test_the_cost_is_refitted_to_the_measured_times_and_plans_the_next_step(rig: dict[str, Any]) -> None:
    scenario = rig["refitted"]
    costs = [cost["model"] for cost in scenario["result"]["costs"]]
    assert costs == ["transformer", "transformer", "transformer", "fitted", "fitted", "fitted"]
    assert scenario["result"]["costs"][0]["linear"] != 24576.0  # the model's own
    for cost in scenario["result"]["costs"][3:]:
        assert cost["linear"] == pytest.approx(1e-4, rel=1e-3)
        assert cost["quadratic"] == pytest.approx(4e-7, rel=1e-3)
        assert cost["per_call"] == pytest.approx(0.01, rel=1e-3)


def test_the_fit_is_logged_and_the_times_are_not(rig: dict[str, Any]) -> None:
    scenario = rig["refitted"]
    steps = scenario["result"]["metrics"]
    assert [step["equipoise/fit/used"] for step in steps] == [0, 0, 0, 1, 1, 1]
    calls = [step["equipoise/fit/calls"] for step in steps]
    assert calls[0] == 0
    assert 0 < calls[1] < 10 <= calls[2] < calls[3] == calls[4] < calls[5]
    assert ["equipoise/fit/error" in step for step in steps] == [False, False, True, True, False, True]
    assert steps[2]["equipoise/fit/error"] > 0.01  # the model's FLOPs know nothing of the time of a call
    assert steps[3]["equipoise/fit/error"] < 1e-3
    assert steps[5]["equipoise/fit/r2"] == pytest.approx(1.0)
    assert not any("equipoise_seconds" in key for step in steps for key in step)
    warnings = [line for line in scenario["heard"] if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "sent no times" in warnings[0]


@pytest.mark.parametrize(
    ("scenario", "kind", "words"),
    [
        ("unknown_key", "InvalidConfig", ["equipoise.algoritm", "'kk'", "did you mean 'algorithm'"]),  # N2
        ("bad_value", "InvalidConfig", ["equipoise.algorithm", "'best'", "refined"]),
        ("plain_string", "InvalidConfig", ["'default'", "Hydra did not find the group", "equipoise doctor"]),
        ("mini_batch", "InvalidConfig", ["ppo_mini_batch_size", "data-parallel size 4", "3 × 1 = 3", "use 4"]),
        ("fixed_rows", "InvalidConfig", ["ppo_micro_batch_size_per_gpu", "2 rows", "got 3", "[1, 2]"]),  # C5, A8
        ("row_above_cap", "InfeasiblePlan", ["ppo_max_token_len_per_gpu", "600", "601", "oversize", "step 1"]),  # B3
        ("measured_and_fitted", "InvalidConfig", ["equipoise.cost", "fitted", "planner=verl"]),
        ("unwritable_record", "InvalidConfig", ["equipoise.record", "/proc/nowhere"]),
    ],
)
def test_bad_settings_are_refused_in_words(rig: dict[str, Any], scenario: str, kind: str, words: list[str]) -> None:
    result = rig[scenario]["result"]
    assert result["type"] == kind
    for word in words:
        assert word in result["text"]


def test_b3_a_row_above_the_cap_may_run_alone(rig: dict[str, Any]) -> None:
    assert rig["row_above_cap_alone"]["result"] == {"type": None, "text": ""}


def test_a_verl_with_other_code_is_refused_unless_asked_for(rig: dict[str, Any]) -> None:
    result = rig["other_verl"]["result"]
    assert result["checked"]["type"] == "PatchMismatch"
    assert "PPOTrainer._update_actor" in result["checked"]["text"]
    assert result["at_own_risk"]["type"] is None
