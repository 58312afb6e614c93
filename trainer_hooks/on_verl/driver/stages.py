"""What one trainer runs: its updates and passes, their settings, and the ranks of their worker groups."""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

from equipoise.trainer_hooks.on_verl.driver.settings import Stage, StageSettings, stage_settings


class TrainerStages:
    """A reader of a verl v1 ``PPOTrainer``.

    Args:
        trainer: constructed; its worker groups are read on demand.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.config: Any = trainer.config

    def all(self) -> list[Stage]:
        """Updates and passes that this trainer runs."""
        found: list[Stage] = ["actor", "old_log_prob"]
        if self.trainer.use_reference_policy:
            found.append("ref")
        if self.trainer.use_critic:
            found.extend(("critic", "values"))
        return found

    def updates(self) -> list[Stage]:
        """Updates of the current step, in verl's order; the actor has none while the critic warms up."""
        updates: list[Stage] = ["critic"] if self.trainer.use_critic else []
        if int(self.config.trainer.critic_warmup) <= int(self.trainer.global_steps):
            updates.append("actor")
        return updates

    def planned_update(self) -> Stage:
        """The update that the order of the balanced batch is for."""
        updates = self.updates()
        return "critic" if updates == ["critic"] else "actor"

    def settings(self, stage: Stage) -> StageSettings:
        """How verl runs the stage; a reference that is the actor without its adapter runs as the actor does."""
        shared = stage == "ref" and self._shared_reference()
        return stage_settings(self.config, "old_log_prob" if shared else stage)

    def dp_size(self, stage: Stage) -> int:
        """Data-parallel ranks of the stage's worker group, from verl's dispatch mapping."""
        trainer = self.trainer
        if stage in ("critic", "values"):
            group, mesh = trainer.critic_wg, "train"
        elif stage == "ref" and not self._shared_reference():
            group, mesh = trainer.ref_policy_wg, "ref"
        else:
            group, mesh = trainer.actor_rollout_wg, "actor"
        if mesh not in group._dispatch_info:
            group._dispatch_info[mesh] = group._query_dispatch_info(mesh)
        return max(group._dispatch_info[mesh]) + 1

    def balances(self) -> bool:
        """Whether the batch may be reordered."""
        return bool(self.config.trainer.get("balance_batch", True))

    def _shared_reference(self) -> bool:
        return bool(getattr(self.trainer, "ref_in_actor", False))
