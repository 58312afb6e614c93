"""Run an unmodified verl on a machine without an accelerator, for examples and tests.

Enabled by ``VERL_PLATFORM=cpu``; without it this module does nothing. verl imports it in every process of a job
(entry point group ``verl.plugins``), so it imports nothing but the hook helper. The shims are in
:mod:`~equipoise.trainer_hooks.verl_on_cpu.patches`, the additional settings of a job in
:mod:`~equipoise.trainer_hooks.verl_on_cpu.launch`.
"""

import os
from types import ModuleType

from equipoise.trainer_hooks._imports import when_imported


def is_asked_for() -> bool:
    """Return whether the environment selects the platform ``cpu``, read as verl reads it."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def _attach(platforms: ModuleType) -> None:
    if platforms.PlatformRegistry.get("cpu") is not None:
        return  # another plugin provides the platform and its own shims
    from equipoise.trainer_hooks.verl_on_cpu import patches, platform

    platforms.PlatformRegistry.register(platform="cpu")(platform.CPUPlatform)
    patches.attach()


if is_asked_for():
    when_imported("verl.plugin.platform", _attach)
