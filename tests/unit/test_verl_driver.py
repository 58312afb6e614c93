"""verl's own trainer class: what the hook does on the driver."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

import equipoise as eq
from equipoise.trainer_hooks.on_verl.driver.settings import stage_settings
from equipoise.trainer_hooks.on_verl.driver.stages import TrainerStages
from tests.unit.verl_driver import (
    LENGTHS,
    Groups,
    MemoryQueue,
    TimedGroups,
    lengths_of,
    padding_of,
    trainer,
)

CRITIC = ("algorithm.adv_estimator=gae", "critic.enable=True")
REFERENCE = ("actor_rollout_ref.actor.use_kl_loss=True",)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> MemoryQueue:
    return MemoryQueue.installed(monkeypatch)


def steps_of(batch: Any, wire: dict[str, Any]) -> list[list[int]]:
    """Row places of each mini-batch, over all ranks, from what the workers are told."""
    steps: list[list[int]] = [[] for _ in range(wire["steps"])]
    at = 0
    for rank in range(wire["dp"]):
        for step in range(wire["steps"]):
            rows = sum(wire["sizes"][step][rank])
            steps[step] += range(at, at + rows)
            at += rows
    assert at == len(batch)
    return steps


def test_the_batch_is_padded_with_the_fewest_tokens_and_loses_no_row(queue: MemoryQueue) -> None:
    batch = trainer()._balance_batch(queue.put(LENGTHS), {})
    padding = padding_of(batch)
    assert (len(batch), sum(padding)) == (32, 2)
    real = [n for n, pad in zip(lengths_of(batch), padding, strict=True) if not pad]
    assert Counter(real) == Counter(LENGTHS)
    added = [i for i, pad in enumerate(padding) if pad]
    for i in added:
        row = queue.kept[batch.partition_id, batch.keys[i]]
        assert row["input_ids"].tolist() == [2, 2]
        assert (row["response_mask"].tolist(), row["loss_mask"].tolist()) == ([0], [0])
        tag = batch.tags[i]
        assert (tag["prompt_len"], tag["response_len"], tag["seq_len"]) == (1, 1, 2)
    uids = [queue.kept[batch.partition_id, key]["uid"] for key in batch.keys]
    groups = Counter(uids)
    assert all(groups[uids[i]] == 1 for i in added)
    assert all(batch.keys[i].split("_")[0] == uids[i] for i in range(len(batch)))


@pytest.mark.parametrize(("overrides", "tokens"), [(("equipoise.min_row_tokens=5",), 5), ((), 2)])
def test_padding_rows_have_the_tokens_that_are_asked_for(
    queue: MemoryQueue, overrides: tuple[str, ...], tokens: int
) -> None:
    batch = trainer(*overrides)._balance_batch(queue.put(LENGTHS), {})
    found = [n for n, pad in zip(lengths_of(batch), padding_of(batch), strict=True) if pad]
    assert found == [tokens] * 2
    row = queue.kept[batch.partition_id, batch.keys[padding_of(batch).index(True)]]
    assert (row["prompts"].numel(), row["responses"].numel()) == (tokens - 1, 1)


def test_a_batch_that_needs_none_is_not_padded(queue: MemoryQueue) -> None:
    batch = trainer()._balance_batch(queue.put(LENGTHS[:16]), {})
    assert len(batch) == len(queue.kept) == 16


@pytest.mark.parametrize(
    ("overrides", "sizes", "rows"),
    [
        ((), {}, 24),  # 4 prompts × 2
        (REFERENCE, {"ref": 5}, 40),
        (CRITIC, {"train": 5}, 40),
        ((*CRITIC, "critic.ppo_mini_batch_size=3"), {}, 24),
        ((*CRITIC, "critic.ppo_mini_batch_size=5", "trainer.critic_warmup=3"), {}, 20),  # the actor has no update
    ],
)
def test_the_rows_are_a_multiple_of_every_mini_batch_and_every_stages_ranks(
    queue: MemoryQueue, overrides: tuple[str, ...], sizes: dict[str, int], rows: int
) -> None:
    made = trainer(*overrides, "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.balance_batch=False", dp=2)
    for mesh, dp in sizes.items():
        group = {"actor": "actor_rollout_wg", "ref": "ref_policy_wg", "train": "critic_wg"}[mesh]
        setattr(made, group, Groups(**{mesh: dp}))
    assert len(made._balance_batch(queue.put(LENGTHS[:18]), {})) == rows


def test_actor_and_critic_mini_batches_of_other_sizes_both_divide_the_batch(queue: MemoryQueue) -> None:
    """Case A5 of the reported cases: the least common multiple of 8, 48 × 4 and 64 × 4 is 768."""
    overrides = ("critic.ppo_mini_batch_size=48", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    made = trainer(*CRITIC, *overrides, "actor_rollout_ref.rollout.n=4", dp=8)
    assert len(made._balance_batch(queue.put([8] * 700, group=4), {})) == 768


def test_the_ranks_of_a_group_are_asked_for_once(queue: MemoryQueue) -> None:
    made, asked = trainer(), list[str]()
    made.actor_rollout_wg._dispatch_info = {}

    def query(mesh: str) -> list[int]:
        asked.append(mesh)
        return [0, 0, 1, 1]

    made.actor_rollout_wg._query_dispatch_info = query
    stages = TrainerStages(made)
    assert [stages.dp_size("actor"), stages.dp_size("old_log_prob")] == [2, 2]
    assert asked == ["actor"]


def test_a_reference_that_is_the_actor_runs_as_the_actor_does() -> None:
    made = trainer(*REFERENCE, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=77")
    made.ref_policy_wg = None
    stages = TrainerStages(made)
    assert stages.settings("ref").cap == 77
    made.ref_in_actor = True
    assert stages.dp_size("ref") == 4
    assert stages.settings("ref") == stages.settings("old_log_prob")


def test_a_pass_that_does_not_ask_for_dynamic_micro_batches_runs_fixed_ones() -> None:
    from omegaconf import open_dict

    made = trainer(*REFERENCE, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2").config
    with open_dict(made):
        del made.actor_rollout_ref.ref.log_prob_use_dynamic_bsz
    settings = stage_settings(made, "ref")
    assert (settings.micro_rows, settings.cap) == (2, None)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ((), ["actor", "old_log_prob"]),
        (REFERENCE, ["actor", "old_log_prob", "ref"]),
        (CRITIC, ["actor", "old_log_prob", "critic", "values"]),
    ],
)
def test_the_stages_are_those_that_the_trainer_runs(overrides: tuple[str, ...], names: list[str]) -> None:
    assert TrainerStages(trainer(*overrides)).all() == names


def test_the_update_gets_the_plan_of_the_order_it_runs_in(queue: MemoryQueue) -> None:
    made, metrics = trainer(), {}
    batch = made._update_actor(made._balance_batch(queue.put(LENGTHS), metrics), metrics)
    (sent,) = made.actor_rollout_wg.sent
    assert sent["keys"] == batch.keys
    assert (sent["wire"]["dp"], sent["wire"]["steps"], sent["exact"]) == (4, 4, False)
    steps = steps_of(batch, sent["wire"])
    assert [len(rows) for rows in steps] == [8] * 4
    padding = padding_of(batch)
    real = [sum(not padding[row] for row in rows) for rows in steps]
    assert real == sent["wire"]["real"]
    assert min(real) >= 1
    assert batch.extra_info.keys().isdisjoint({"equipoise_plan", "equipoise_exact_loss"})


def test_rollouts_of_a_prompt_stay_in_one_optimizer_step(queue: MemoryQueue) -> None:
    made = trainer()
    batch = made._balance_batch(queue.put(LENGTHS), {})
    made._update_actor(batch, {})
    for rows in steps_of(batch, made.actor_rollout_wg.sent[0]["wire"]):
        whole = Counter(batch.keys[row].split("_")[0] for row in rows if not padding_of(batch)[row])
        # padding is spread, which can cut one prompt at each border
        assert sum(count == 1 for count in whole.values()) <= 2


def test_verls_length_metrics_are_kept_and_the_plans_added(queue: MemoryQueue) -> None:
    metrics: dict[str, Any] = {}
    batch = trainer()._balance_batch(queue.put(LENGTHS), metrics)
    lengths = torch.tensor(lengths_of(batch)).reshape(4, -1)
    assert metrics["global_seqlen/mean"] == lengths.sum() / 4
    assert metrics["global_seqlen/balanced_max"] == lengths.sum(1).max()
    assert metrics["global_seqlen/balanced_min"] == lengths.sum(1).min()
    assert {f"global_seqlen/{name}" for name in ("min", "max", "minmax_diff")} <= metrics.keys()
    assert 1.0 <= metrics["equipoise/lockstep_over_bound"] <= metrics["equipoise/lockstep_over_bound_incoming"]
    assert metrics["equipoise/max_tokens"] <= 600
    assert metrics["equipoise/plan_seconds"] > 0


def test_actor_and_critic_each_get_a_plan_with_their_own_number_of_steps(queue: MemoryQueue) -> None:
    made, metrics = trainer(*CRITIC, "critic.ppo_mini_batch_size=8"), {}
    batch = made._balance_batch(queue.put(LENGTHS), metrics)
    batch = made._update_actor(made._update_critic(batch, metrics), metrics)
    (critic,), (actor,) = made.critic_wg.sent, made.actor_rollout_wg.sent
    assert critic["wire"]["steps"] == 2  # 32 rows, 8 prompts × 2
    assert actor["wire"]["steps"] == 4  # 32 rows, 4 prompts × 2
    assert sorted(critic["keys"]) == sorted(actor["keys"])
    assert critic["keys"] != actor["keys"]
    assert "equipoise_plan" not in batch.extra_info
    assert "equipoise/critic/lockstep_over_bound" in metrics


def test_stages_with_equal_settings_share_a_plan_and_its_message(queue: MemoryQueue) -> None:
    made = trainer()
    planner = made._balance_batch.__self__
    batch = made._balance_batch(queue.put(LENGTHS), {})
    first = planner._message("old_log_prob", batch, {}, planner._batch)
    assert first is planner._message("old_log_prob", batch, {}, planner._batch)
    assert planner._plan("actor") is not planner._plan("old_log_prob")  # four mini-batches and one


def test_without_balancing_nothing_is_reordered_and_padding_is_still_counted_out(queue: MemoryQueue) -> None:
    made, metrics = trainer("trainer.balance_batch=False"), {}
    before = queue.put(LENGTHS)
    keys = list(before.keys)
    batch = made._balance_batch(before, metrics)
    made._update_actor(batch, metrics)
    assert batch.keys[: len(keys)] == keys
    (sent,) = made.actor_rollout_wg.sent
    assert sent["keys"] == batch.keys
    assert sent["wire"]["sizes"] is None  # verl makes the micro-batches
    assert sent["wire"]["real"] == [8, 8, 8, 6]  # both padding rows are the last of rank 3
    assert "global_seqlen/mean" in metrics
    assert "equipoise/lockstep_over_bound" not in metrics


def test_without_balancing_and_padding_nothing_is_sent(queue: MemoryQueue) -> None:
    made = trainer("trainer.balance_batch=False")
    made._update_actor(made._balance_batch(queue.put(LENGTHS[:16]), {}), {})
    assert made.actor_rollout_wg.sent[0]["wire"] is None


def test_shuffling_in_the_workers_is_left_to_verl_with_one_warning_but_real_rows_are_counted(
    queue: MemoryQueue, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer("actor_rollout_ref.actor.shuffle=True")
    for _ in range(2):
        made._update_actor(made._balance_batch(queue.put(LENGTHS), {}), {})
        assert made.actor_rollout_wg.sent[-1]["wire"]["sizes"] is None
        assert sum(made.actor_rollout_wg.sent[-1]["wire"]["real"]) == 30
    assert len(caplog.messages) == 1
    assert "actor.shuffle=True" in caplog.messages[0]


def test_rows_filtered_after_balancing_are_planned_anew(queue: MemoryQueue) -> None:
    made = trainer()
    batch = made._balance_batch(queue.put(LENGTHS), {})
    made._update_actor(batch.select_keys(sorted(batch.keys)[:16]), {})
    (sent,) = made.actor_rollout_wg.sent
    assert (len(sent["keys"]), sent["wire"]["steps"]) == (16, 2)


def test_an_exact_loss_is_asked_for_in_every_update(queue: MemoryQueue) -> None:
    made = trainer(*CRITIC, "equipoise.loss=exact", "trainer.balance_batch=False")
    batch = made._balance_batch(queue.put(LENGTHS[:16]), {})
    batch = made._update_actor(made._update_critic(batch, {}), {})
    assert made.critic_wg.sent[0]["exact"]
    assert made.actor_rollout_wg.sent[0]["exact"]
    assert "equipoise_exact_loss" not in batch.extra_info


def test_preset_off_attaches_and_says_nothing(
    queue: MemoryQueue, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made, metrics = trainer("equipoise=off"), {}
    assert set(vars(made)) & set(dir(type(made))) == set()
    made._balance_batch(queue.put(LENGTHS[:16]), metrics)
    assert not any(name.startswith("equipoise") for name in metrics)
    assert "equipoise" not in capsys.readouterr().err
    assert not any("equipoise" in message for message in caplog.messages)


def test_preset_verl_measures_verls_own_order(queue: MemoryQueue) -> None:
    found, metrics = trainer("equipoise=verl"), {}
    batch = found._balance_batch(queue.put(LENGTHS[:16]), metrics)
    assert found._update_actor.__func__ is type(found)._update_actor
    assert lengths_of(batch) == lengths_of(trainer("equipoise=off")._balance_batch(queue.put(LENGTHS[:16]), {}))
    cost = eq.TransformerCost()(lengths_of(batch)).reshape(4, 2, 2)
    bound = sum(max(cost[:, j].sum() / 4, cost[:, j].max()) for j in range(2))
    worst = sum(cost[:, j].sum(1).max() for j in range(2))
    assert metrics["equipoise/rank_over_bound"] == pytest.approx(worst / bound)


def test_one_line_says_what_is_attached_and_no_logger_is_touched(capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    logger = logging.getLogger("equipoise")
    before = (logger.level, logger.propagate, list(logger.handlers))
    trainer()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "equipoise" in line]
    assert "PPOTrainerSync" in line
    assert "actor, old_log_prob" in line
    assert "critic" not in line
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_the_record_has_what_was_planned(queue: MemoryQueue, tmp_path: Path) -> None:
    made = trainer(f"equipoise.record={tmp_path}/deep/record.jsonl")
    batch = made._balance_batch(queue.put(LENGTHS), {})
    (line,) = [json.loads(line) for line in (tmp_path / "deep" / "record.jsonl").read_text().splitlines()]
    assert (line["step"], line["role"], line["dp_size"], line["num_mini_batches"]) == (1, "actor", 4, 4)
    order = [row for rank in line["micro_batches"] for step in rank for micro in step for row in micro]
    assert [line["lengths"][row] for row in order] == lengths_of(batch)
    assert [line["is_padding"][row] for row in order] == padding_of(batch)


def test_the_cost_is_refitted_to_the_measured_times_and_plans_the_next_step(
    queue: MemoryQueue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Six steps with cost=fitted; in the fifth the workers fall back."""
    Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=100).save_pretrained(tmp_path)
    record = tmp_path / "record.jsonl"
    overrides = ("equipoise.cost=fitted", f"equipoise.record={record}", f"actor_rollout_ref.model.path={tmp_path}")
    made = trainer(*overrides, dp=2)
    made.actor_rollout_wg = TimedGroups(actor=2)
    steps: list[dict[str, Any]] = []
    for step in range(6):
        metrics: dict[str, Any] = {}
        draw = np.random.default_rng(step)
        made.actor_rollout_wg.silent = step == 4
        batch = made._balance_batch(queue.put(draw.integers(6, 300, 32).tolist()), metrics)
        made._update_actor(batch, metrics)
        steps.append(metrics)
    costs = [json.loads(line)["cost"] for line in record.read_text().splitlines()]
    assert [cost["model"] for cost in costs] == ["transformer", "transformer", "transformer", *["fitted"] * 3]
    assert costs[0]["linear"] != 24576.0  # the model's own
    for cost in costs[3:]:
        assert cost["linear"] == pytest.approx(1e-4, rel=1e-3)
        assert cost["quadratic"] == pytest.approx(4e-7, rel=1e-3)
        assert cost["per_call"] == pytest.approx(0.01, rel=1e-3)
    assert [step["equipoise/fit/used"] for step in steps] == [0, 0, 0, 1, 1, 1]
    calls = [step["equipoise/fit/calls"] for step in steps]
    assert calls[0] == 0
    assert 0 < calls[1] < 10 <= calls[2] < calls[3] == calls[4] < calls[5]
    assert ["equipoise/fit/error" in step for step in steps] == [False, False, True, True, False, True]
    assert steps[2]["equipoise/fit/error"] > 0.01  # the model's FLOPs know nothing of the time of a call
    assert steps[3]["equipoise/fit/error"] < 1e-3
    assert steps[5]["equipoise/fit/r2"] == pytest.approx(1.0)
    assert not any("equipoise_seconds" in key for step in steps for key in step)
    assert len(caplog.messages) == 1
    assert "times" in caplog.messages[0]
