"""What the verl hook refuses on the driver, with verl's own trainer class and configuration."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import pytest

from equipoise.errors import EquipoiseWarning, InfeasiblePlan, InvalidConfig, InvalidInput, PatchMismatch
from tests.unit.verl_driver import LENGTHS, Groups, MemoryQueue, config, constructed, trainer

CRITIC = ("algorithm.adv_estimator=gae", "critic.enable=True")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> MemoryQueue:
    return MemoryQueue.installed(monkeypatch)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+equipoise.algoritm=kk"], ["equipoise.algoritm", "'kk'", "'algorithm'"]),
        (["equipoise.algorithm=best"], ["equipoise.algorithm", "'best'", "refined"]),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=3", "actor_rollout_ref.rollout.n=1"],
            ["ppo_mini_batch_size", "3 × 1 = 3", "use 4 "],
        ),
        (
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=False",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
            ],
            ["ppo_micro_batch_size_per_gpu", "2 rows", "got 3", "[1, 2]"],
        ),
        (["equipoise=verl", "equipoise.cost=fitted"], ["equipoise.cost", "fitted", "planner=verl"]),
        (["equipoise=verl", "equipoise.loss=exact"], ["equipoise.loss", "exact", "planner=verl"]),
        (["equipoise.record=/proc/nowhere/record.jsonl"], ["equipoise.record", "/proc/nowhere"]),
        (
            ["equipoise.loss=exact", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
            ["actor_rollout_ref.actor.loss_scale_factor", "None", "seq-mean-token-sum-norm"],
        ),
        (
            ["equipoise.loss=exact", "critic.loss_agg_mode=seq-mean-token-sum-norm"],
            ["critic.loss_scale_factor", "None", "seq-mean-token-sum-norm"],
        ),
        (["equipoise.loss=exact", "distillation.enabled=True"], ["distillation.enabled", "equipoise.loss"]),
    ],
)
def test_bad_settings_are_refused_when_the_trainer_is_made(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        trainer(*overrides)
    for word in words:
        assert word in str(caught.value)


def test_a_constant_horizon_makes_the_norm_mode_exact() -> None:
    mode = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
    trainer("equipoise.loss=exact", mode, "actor_rollout_ref.actor.loss_scale_factor=64")


def test_a_group_that_hydra_did_not_find_is_refused() -> None:
    """Then ``+equipoise=default`` makes a plain string."""
    from omegaconf import open_dict

    made = config()
    with open_dict(made):
        made.equipoise = "default"
    with pytest.raises(InvalidConfig, match=r"(?s)'default'.*equipoise doctor"):
        constructed(made)


def test_settings_that_only_the_running_groups_tell_are_refused_before_the_first_rollout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = trainer()
    planner = made._balance_batch.__self__
    planner.check()
    assert [message for message in caplog.messages if "1024" in message]  # 512 + 512 tokens, above the cap of 600
    made.actor_rollout_wg = Groups(actor=3)
    with pytest.raises(InvalidConfig, match=r"actor.*4 × 2 = 8.*(3|6)"):
        planner.check()
    made = trainer(*CRITIC, "critic.ppo_mini_batch_size=4")
    made.critic_wg = Groups(train=3)
    with pytest.raises(InvalidConfig, match=r"critic\.ppo_mini_batch_size.*4 × 2 = 8"):
        made._balance_batch.__self__.check()


def test_a_row_above_the_cap_ends_the_run_or_runs_alone(queue: MemoryQueue) -> None:
    with pytest.raises(InfeasiblePlan, match=r"step 1.*ppo_max_token_len_per_gpu.*600.*601.*oversize"):
        trainer()._balance_batch(queue.put([*LENGTHS, 601, 601]), {})
    with pytest.warns(EquipoiseWarning, match="601"):
        trainer("equipoise.oversize=alone")._balance_batch(queue.put([*LENGTHS, 601, 601]), {})


def test_an_empty_batch_is_refused() -> None:
    from transfer_queue import KVBatchMeta

    with pytest.raises(InvalidInput, match=r"row.*0"):
        trainer()._balance_batch(KVBatchMeta(keys=[], tags=[], partition_id="train"), {})


def test_a_verl_with_other_code_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import trainer_base

    def _update_actor(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        raise AssertionError(self, batch, metrics)

    monkeypatch.setattr(trainer_base.PPOTrainer, "_update_actor", _update_actor)
    with pytest.raises(PatchMismatch, match=r"PPOTrainer\._update_actor"):
        trainer()
    trainer("equipoise.check_patch_points=False")


def test_a_legacy_trainer_refuses_the_node() -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from equipoise.trainer_hooks.on_verl.driver.attach import refuse_legacy

    legacy: Any = RayPPOTrainer
    with pytest.raises(InvalidConfig, match=r"trainer\.use_v1"):
        legacy(config(), None, {}, None)
    refuse_legacy(config("equipoise=off"))
