"""Attach to one trainer instance, or refuse.

``attach`` replaces methods of one trainer. Between verl's stages the batch is only keys and tags, so each stage can use
its own order at no cost.
"""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
from typing import Any

from equipoise.config import EquipoiseConfig
from equipoise.errors import InvalidConfig, must
from equipoise.trainer_hooks.on_verl import _patches
from equipoise.trainer_hooks.on_verl._say import say
from equipoise.trainer_hooks.on_verl.driver.checks import check_config
from equipoise.trainer_hooks.on_verl.driver.planner import StepPlanner
from equipoise.trainer_hooks.on_verl.driver.settings import Stage
from equipoise.trainer_hooks.on_verl.router.setup import attach_rollout

_METHODS: dict[Stage, str] = {
    "old_log_prob": "_compute_old_log_prob",
    "ref": "_compute_ref_log_prob",
    "values": "_compute_values",
    "critic": "_update_critic",
    "actor": "_update_actor",
}


def read_config(config: Any) -> EquipoiseConfig:
    """The checked node; also checks that verl is the one that the hook was written for.

    Raises:
        InvalidConfig: the node is not a mapping, or has an unknown key or an illegal value.
        PatchMismatch: verl differs.
    """
    settings = _node_of(config)
    if settings.enable:
        check_config(config, settings)
        if settings.check_patch_points:
            _patches.check_points(rollout=settings.rollout.enable)
    return settings


def refuse_legacy(config: Any) -> None:
    """Stop a legacy trainer whose configuration asks for Equipoise.

    Raises:
        InvalidConfig: the node is there and enabled.
    """
    if _node_of(config).enable:
        raise InvalidConfig(
            must(
                "trainer.use_v1",
                "be true with +equipoise: the legacy trainer is not supported",
                config.trainer.get("use_v1", None),
                "set trainer.use_v1=True or remove +equipoise",
            )
        )


def _node_of(config: Any) -> EquipoiseConfig:
    from omegaconf import DictConfig, OmegaConf

    node = config.get("equipoise")
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    return EquipoiseConfig.from_node(plain)


def attach(trainer: Any, config: EquipoiseConfig) -> None:
    """Take over balancing on ``trainer``; does nothing when disabled."""
    if not config.enable:
        return
    planner = StepPlanner(trainer, config)
    original_init, original_balance = trainer.init, trainer._balance_batch

    def init() -> None:
        original_init()
        planner.check()

    trainer.init = init
    if config.planner == "verl":
        trainer._balance_batch = functools.partial(planner.measure, original_balance)
        attach_rollout(trainer, config)
        say("measures verl's own balancing (planner=verl) and changes nothing")
        return
    trainer._balance_batch = planner.balance
    attach_rollout(trainer, config)
    for stage, name in _METHODS.items():
        setattr(trainer, name, functools.partial(planner.run, stage, getattr(trainer, name)))
    say(
        f"plans each step of {type(trainer).__name__} (algorithm={config.algorithm}, cost={config.cost},"
        f" composition={config.composition}): padding, order, mini-batches, ranks and micro-batches of"
        f" {', '.join(planner.stages.all())}"
    )
