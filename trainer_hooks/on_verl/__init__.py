"""Equipoise in verl: loaded by verl's plugin entry point in the driver and in every worker process.

Importing this module only leaves two notes: one for when verl's trainer is imported, one for when its engine utilities
are. Without a node ``equipoise`` in the trainer's configuration neither does anything more than look for it.
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


when_imported("verl.trainer.ppo.v1.trainer_base", _on_trainer)
when_imported("verl.trainer.ppo.ray_trainer", _on_legacy_trainer)
when_imported("verl.workers.engine.utils", _on_engine_utils)
