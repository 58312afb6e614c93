"""Equipoise in verl: loaded by verl's plugin entry point in the driver and in every worker process.

Importing this package registers hooks on verl's trainers, engines and losses, without importing them. Without an
``equipoise`` node in the trainer's configuration, the hooks only look for it. ``driver/`` runs in the trainer's
process, ``worker/`` in the training workers, ``router/`` in the actor that routes requests.
"""

from types import ModuleType

from equipoise.trainer_hooks._imports import when_imported


def _on_trainer(module: ModuleType) -> None:
    from equipoise.trainer_hooks.on_verl import _patches

    _patches.patch_trainer(module)


def _on_legacy_trainer(module: ModuleType) -> None:
    from equipoise.trainer_hooks.on_verl import _patches

    _patches.patch_legacy_trainer(module)


def _on_engine_utils(module: ModuleType) -> None:
    from equipoise.trainer_hooks.on_verl import _patches

    _patches.patch_engines(module)


def _on_aggregation(module: ModuleType) -> None:
    from equipoise.trainer_hooks.on_verl import _patches

    _patches.patch_aggregation(module)


def _on_losses(module: ModuleType) -> None:
    from equipoise.trainer_hooks.on_verl import _patches

    _patches.patch_losses(module)


when_imported("verl.trainer.ppo.v1.trainer_base", _on_trainer)
when_imported("verl.trainer.ppo.ray_trainer", _on_legacy_trainer)
when_imported("verl.workers.engine.utils", _on_engine_utils)
when_imported("verl.trainer.ppo.core_algos", _on_aggregation)
when_imported("verl.workers.utils.losses", _on_losses)
