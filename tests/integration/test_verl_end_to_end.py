"""Unmodified ``python -m verl.trainer.main_ppo``, with and without ``+equipoise=default``, on a tiny model.

Runs share a module-wide pool, two at a time: most of a run is waiting for processes to start.
"""

# psutil ships no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import math
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_overrides
from tests.integration import slow_tokens
from tests.integration.verl_rig import Completed, run_verl, tiny_overrides

pytestmark = pytest.mark.slow

ON = ["+equipoise=default", "equipoise.record=record.jsonl"]
SCRIPTS = {f"{name}+": Path(__file__).parents[2] / "examples" / name / "run.sh" for name in ("grpo", "ppo")}
"""Runs that a script of the examples starts; it brings ``+equipoise=default`` and what our overrides overrule."""
PPO = [
    *[line for line in cpu_overrides(4, critic=True) if "critic" in line],
    "algorithm.adv_estimator=gae",
    "critic.model.path=${actor_rollout_ref.model.path}",
    "critic.model.use_remove_padding=True",
    "critic.optim.lr=1e-3",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=700",
]
ONE_STEP = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.use_kl_loss=True",
]
RUNS: dict[str, tuple[int, list[str]]] = {
    # one mini-batch a step, so that the order of the prompts, which is random, makes no difference
    "grpo": (
        1,
        [
            *ONE_STEP,
            "actor_rollout_ref.model.use_remove_padding=False",
            "trainer.val_before_train=True",
            "trainer.test_freq=2",
        ],
    ),
    "grpo+": (
        2,
        [
            *ON[1:],
            *ONE_STEP,
            "equipoise.loss=exact",
            "trainer.val_before_train=True",
            "trainer.save_freq=2",
            "trainer.default_local_dir=checkpoints",
        ],
    ),
    # 6 prompts × 4 rows against mini-batches of 16 rows: 8 padding rows; and requests that move between 4 replicas
    "ppo+": (
        4,
        [
            *ON[1:],
            *PPO,
            "data.train_batch_size=6",
            "critic.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "equipoise.rollout.enable=true",
            "equipoise.rollout.transfer=kv",
            "equipoise.rollout.check_interval=1",
            "equipoise.rollout.tiers=[8,4,2,1]",
            "equipoise.rollout.profile=false",
            "data.max_response_length=96",
        ],
    ),
    # with a cost that is refitted: rows of uneven length, in updates that take time by the token
    "colocate_async+": (
        2,
        [
            *ON,
            "trainer.v1.trainer_mode=colocate_async",
            "equipoise.cost=fitted",
            "equipoise.fit_min_r2=0.2",
            "equipoise.composition=sorted",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_epochs=3",
            "data.max_response_length=160",
            "actor_rollout_ref.model.external_lib=[slow_tokens]",
            f"++actor_rollout_ref.model.override_config.attn_implementation={slow_tokens.NAME}",
        ],
    ),
}
STEPS = {name: 3 if name == "colocate_async+" else 2 for name in RUNS}
ENV = {
    "colocate_async+": {"EQUIPOISE_CPU_LEN_SKEW": "2", "PYTHONPATH": str(Path(slow_tokens.__file__).parent)},
    "ppo+": {"EQUIPOISE_CPU_LEN_SKEW": "2"},
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Completed]]]:
    folder = tmp_path_factory.mktemp("verl")
    with ThreadPoolExecutor(max_workers=2) as threads:
        yield {
            name: threads.submit(
                run_verl,
                [*tiny_overrides(steps=STEPS[name]), *overrides],
                dp=dp,
                cwd=folder / name,
                script=SCRIPTS.get(name),
                env={"PYTHON": sys.executable, **ENV.get(name, {})},
            )
            for name, (dp, overrides) in RUNS.items()
        }


def finished(pool: dict[str, Future[Completed]], name: str) -> Completed:
    return pool[name].result().checked()


def records(run: Completed) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.log.parent / "record.jsonl").read_text().splitlines()]


def training(run: Completed) -> list[Any]:
    return [row for row in run.metrics if "actor/pg_loss" in row]


@pytest.mark.parametrize("name", list(RUNS))
def test_every_step_trains_with_finite_figures(pool: dict[str, Future[Completed]], name: str) -> None:
    steps = training(finished(pool, name))
    assert [row["step"] for row in steps] == list(range(1, STEPS[name] + 1))
    for row in steps:
        for key in ("actor/pg_loss", "actor/grad_norm", "critic/rewards/mean", "global_seqlen/mean"):
            assert math.isfinite(row[key]), (key, row[key])
        assert row["actor/grad_norm"] > 0


def test_training_without_equipoise_validates(pool: dict[str, Future[Completed]]) -> None:
    run = finished(pool, "grpo")
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    first, last = run.series("val-aux/tiny/sum/reward/mean@1")
    assert 0 < first < 1
    assert 0 < last < 1


def test_the_actor_gives_samples_the_probabilities_they_were_drawn_with(pool: dict[str, Future[Completed]]) -> None:
    differences = finished(pool, "grpo").series("training/rollout_probs_diff_max")
    assert len(differences) == 2
    assert max(differences) < 1e-6  # step 2 was sampled with weights that went over to the servers


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith("+")])
def test_steps_are_planned_and_carried_out(pool: dict[str, Future[Completed]], name: str) -> None:
    run = finished(pool, name)
    log = run.log.read_text(errors="replace")
    assert log.count("equipoise: plans each step of") == 1
    assert "verl's own micro-batches are used" not in log
    for row, record in zip(training(run), records(run), strict=True):
        assert 1.0 <= row["equipoise/lockstep_over_bound"] <= row["equipoise/lockstep_over_bound_incoming"] + 1e-9
        assert row["equipoise/max_tokens"] <= record["max_token_len"] == 512
        rows = sorted(i for rank in record["micro_batches"] for step in rank for m in step for i in m)
        assert rows == list(range(len(record["lengths"])))


def test_without_the_node_nothing_is_attached(pool: dict[str, Future[Completed]]) -> None:
    run = finished(pool, "grpo")
    assert "equipoise:" not in run.log.read_text(errors="replace")
    assert not any(key.startswith("equipoise") for row in run.metrics for key in row)


def test_a_plan_packed_rows_and_an_exact_loss_train_as_verl_does(pool: dict[str, Future[Completed]]) -> None:
    verls, exact = training(finished(pool, "grpo")), training(finished(pool, "grpo+"))
    for one, other in zip(verls, exact, strict=True):
        for key in ("response_length/mean", "prompt_length/mean", "critic/score/mean", "critic/rewards/mean"):
            assert other[key] == pytest.approx(one[key], rel=1e-6), key
        for key in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "actor/entropy_loss"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key


def test_ppo_updates_critic_and_actor_by_plans_of_their_own(pool: dict[str, Future[Completed]]) -> None:
    run = finished(pool, "ppo+")
    for row in training(run):
        assert math.isfinite(row["critic/vf_loss"])
        assert math.isfinite(row["actor/kl_loss"])
        assert row["equipoise/critic/lockstep_over_bound"] >= 1.0
    assert all(record["num_mini_batches"] == 2 for record in records(run))  # 32 rows, with padding; 4 prompts × 4


def test_a_batch_that_needs_padding_is_padded_with_two_tokens_a_row(pool: dict[str, Future[Completed]]) -> None:
    run = finished(pool, "ppo+")
    for row, record in zip(training(run), records(run), strict=True):
        pads = [n for n, pad in zip(record["lengths"], record["is_padding"], strict=True) if pad]
        assert pads == [2] * 8
        assert row["equipoise/num_padding"] == 8
        assert record["dp_size"] == 4
        for step in range(record["num_mini_batches"]):
            rows = [i for rank in record["micro_batches"] for m in rank[step] for i in m]
            assert sum(not record["is_padding"][i] for i in rows) == 12


def test_requests_are_routed_by_tokens_and_move(pool: dict[str, Future[Completed]]) -> None:
    run = finished(pool, "ppo+")
    assert run.log.read_text(errors="replace").count("equipoise: routes requests by expected tokens") == 1
    steps = training(run)
    for row in steps:
        figures = {key.removeprefix("equipoise/rollout/"): value for key, value in row.items() if "/rollout/" in key}
        assert figures["requests"] == 24 + figures["moves"]
        assert figures["requests_per_replica_min"] >= 5  # 24 requests on 4 replicas
        assert 0 < figures["idle_share"] < 1
        assert figures["outstanding_max_over_mean"] >= 1
        assert figures["length_error"] >= 0
        assert figures["moves"] <= figures["moves_planned"]
    assert sum(row["equipoise/rollout/moves"] for row in steps) >= 1
    assert sum(row["equipoise/rollout/kv_bytes"] for row in steps) > 0
    assert all(math.isfinite(row.get("equipoise/rollout/measured_saved_seconds", 0.0)) for row in steps)
    assert max(row["training/rollout_probs_diff_max"] for row in steps) < 1e-5  # also of responses that moved
    for name in ("grpo+", "grpo"):
        assert not any("/rollout/" in key for row in finished(pool, name).metrics for key in row)


def test_the_cost_is_refitted_to_measured_times_and_plans_the_last_step(pool: dict[str, Future[Completed]]) -> None:
    run = finished(pool, "colocate_async+")
    steps = training(run)
    assert [record["cost"]["model"] for record in records(run)] == ["transformer", "transformer", "fitted"]
    assert [row["equipoise/fit/used"] for row in steps] == [0, 0, 1]
    # each micro-batch of the three epochs, those of the first step left out
    counts = [3 * row["equipoise/num_micro_batches"] for row in steps]
    assert [row["equipoise/fit/calls"] for row in steps] == [0, counts[1], counts[1] + counts[2]]
    assert steps[1]["equipoise/fit/r2"] >= 0.2
    assert 0 <= steps[2]["equipoise/fit/error"] < 1
    predicted = records(run)[2]["lockstep_cost"] + records(run)[2]["cost"]["per_call"] * counts[2] / 3
    assert 3 * predicted == pytest.approx(steps[2]["timing_s/update_actor"], rel=0.5)  # a cost in seconds
    assert not any("equipoise_seconds" in key for row in steps for key in row)


def test_validation_runs(pool: dict[str, Future[Completed]]) -> None:
    for name in ("grpo", "grpo+"):
        assert any(key.startswith("val-") for row in finished(pool, name).metrics for key in row)


def test_a_run_resumes_and_ends_where_a_worker_dies_leaving_nothing_behind(pool: dict[str, Future[Completed]]) -> None:
    folder = finished(pool, "grpo+").log.parent
    assert (folder / "checkpoints" / "global_step_2").is_dir()
    tag = uuid.uuid4().hex
    with ThreadPoolExecutor(max_workers=1) as threads:
        run = threads.submit(
            run_verl,
            [
                *tiny_overrides(steps=200),
                *ON,
                "trainer.default_local_dir=checkpoints",
                "trainer.resume_mode=auto",
            ],
            dp=2,
            cwd=folder,
            env={"EQUIPOISE_TEST_TAG": tag},
        )
        time.sleep(1)  # the metrics of the first run are gone by then
        steps = folder / "metrics.jsonl"
        while not run.done() and not (steps.exists() and steps.read_text()):
            time.sleep(0.5)
        workers = [p for p in tagged(tag) if "WorkerDict" in " ".join(p.cmdline())]
        assert len(workers) == 2
        workers[1].kill()
        killed = time.monotonic()
        done = run.result()
    assert done.returncode != 0
    assert time.monotonic() - killed < 60
    assert "Error" in done.log.read_text(errors="replace")
    assert tagged(tag) == []
    assert training(done)[0]["step"] == 3


def tagged(tag: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("EQUIPOISE_TEST_TAG") == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
