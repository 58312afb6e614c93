"""Reject verl settings that no plan can satisfy, before the first rollout."""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from equipoise.config import EquipoiseConfig
from equipoise.errors import InvalidConfig, must
from equipoise.trainer_hooks.on_verl.driver.settings import StageSettings, stage_settings
from equipoise.trainer_hooks.on_verl.driver.stages import TrainerStages

_ACTOR_KEY, _CRITIC_KEY = "actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"


def check_config(config: Any, settings: EquipoiseConfig) -> None:
    """Check what the configuration alone shows, before any process starts.

    Raises:
        InvalidConfig: see :func:`check_stages`; or a loss that cannot be made exact.
    """
    if settings.loss == "exact":
        _check_exact_loss(config)
    actor = config.actor_rollout_ref.actor
    if not str(actor.get("strategy", "fsdp")).startswith("fsdp"):
        return
    world = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    stage = stage_settings(config, "actor")
    _check_mini_batch(_ACTOR_KEY, config, stage, max(1, world // stage.sp_size))


def check_stages(stages: TrainerStages, warn: Callable[[str], None]) -> None:
    """Check, after verl's setup and before its first rollout, that its settings can be planned.

    Raises:
        InvalidConfig: the ranks do not divide a mini-batch, or a fixed micro-batch does not divide a rank's share.
    """
    config = stages.config
    _check_mini_batch(_ACTOR_KEY, config, stages.settings("actor"), stages.dp_size("actor"))
    if stages.trainer.use_critic:
        _check_mini_batch(_CRITIC_KEY, config, stages.settings("critic"), stages.dp_size("critic"))
    longest = int(config.data.max_prompt_length) + int(config.data.max_response_length)
    for stage in stages.all():
        settings = stages.settings(stage)
        if settings.cap is not None and longest > settings.cap * settings.sp_size:
            warn(
                f"rows may reach {longest} tokens (max_prompt_length + max_response_length), above the cap"
                f" {settings.cap} × {settings.sp_size} of {settings.cap_key}; such a row stops the run"
                " unless equipoise.oversize=alone"
            )


def _check_exact_loss(config: Any) -> None:
    roles = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor, "critic": config.get("critic", None) or {}}
    for where, role in roles.items():
        mode, factor = role.get("loss_agg_mode", None), role.get("loss_scale_factor", None)
        if mode == "seq-mean-token-sum-norm" and factor is None:
            rule = "be set with equipoise.loss=exact and loss_agg_mode=seq-mean-token-sum-norm"
            remedy = "use a constant, like data.max_response_length: the width of a batch varies"
            raise InvalidConfig(must(f"{where}.loss_scale_factor", rule, factor, remedy))
    if (config.get("distillation", None) or {}).get("enabled", False):
        remedy = "use equipoise.loss=verl: the distillation loss has no exact version"
        raise InvalidConfig(must("distillation.enabled", "be false with equipoise.loss=exact", True, remedy))


def _check_mini_batch(key: str, config: Any, settings: StageSettings, dp_size: int) -> None:
    rows = settings.mini_batch_rows
    if rows is None:
        return
    n = int(config.actor_rollout_ref.rollout.n)
    if rows % dp_size:
        step = dp_size // math.gcd(dp_size, n)
        prompts = rows // n
        legal = sorted({max(step, prompts // step * step), -(-prompts // step) * step})
        raise InvalidConfig(
            must(
                f"{key} × rollout.n",
                f"be a multiple of the data-parallel size {dp_size}",
                f"{prompts} × {n} = {rows}",
                f"use {' or '.join(map(str, legal))} for {key}",
            )
        )
    fixed = settings.micro_rows
    if fixed is not None and (rows // dp_size) % fixed:
        share = rows // dp_size
        legal = [b for b in range(1, share + 1) if share % b == 0]
        raise InvalidConfig(
            must(settings.cap_key, f"divide the {share} rows of a rank in a mini-batch", fixed, f"use one of {legal}")
        )
