"""``equipoise doctor``: would Equipoise run with this environment's verl? Reports what is missing and what to do."""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# ruff: noqa: T201 - a command prints

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from importlib import metadata

from equipoise.config import EquipoiseConfig
from equipoise.errors import EquipoiseError
from equipoise.trainer_hooks.on_verl import _patches

_PACKAGES = (
    "equipoise",
    "verl",
    "TransferQueue",
    "torch",
    "tensordict",
    "wrapt",
    "ray",
    "transformers",
    "hydra-core",
    "omegaconf",
)
_UNDECLARED = {
    "transfer_queue": "TransferQueue",
    "cachetools": "cachetools",
    "uvicorn": "uvicorn",
    "fastapi": "fastapi",
}


def examine(*, quiet: bool = False) -> int:
    """Run all checks, print one line each, and return 0 if Equipoise would run, else 1."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("versions", check_versions),
        ("what verl imports", check_imports),
        ("verl's plugin entry point", check_entry_point),
        ("Hydra group equipoise", check_hydra_group),
        ("patch points", check_patch_points),
        ("trainer and engines attached", check_attached),
    ]
    bad = 0
    for title, check in checks:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # verl warns about each engine that is not installed
                said, good = check(), True
        except (EquipoiseError, ImportError, metadata.PackageNotFoundError) as error:
            said, good = str(error), False
        bad += not good
        if not good or not quiet:
            print(f"{'ok ' if good else 'BAD'}  {title}: {said}", flush=True)
    if bad:
        print(f"{bad} of {len(checks)} checks failed: +equipoise=default would not run correctly")
    elif not quiet:
        print("Equipoise will plan every step of a run with +equipoise=default")
    return int(bad > 0)


def check_versions() -> str:
    """Installed versions; verl must be a tested one."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    if found["verl"] not in _patches.VERL_VERSIONS:
        raise EquipoiseError(
            f"verl must be {' or '.join(_patches.VERL_VERSIONS)}, got {found['verl']}; pip install 'equipoise[verl]'"
        )
    return ", ".join(f"{name} {version}" for name, version in found.items())


def check_imports() -> str:
    """Packages that verl 0.9.1 imports without declaring them."""
    missing = [package for module, package in _UNDECLARED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise EquipoiseError(f"missing {', '.join(missing)}; pip install 'equipoise[verl]'")
    return ", ".join(_UNDECLARED.values())


def check_entry_point() -> str:
    """The entry point is installed, and verl's environment variable allows it."""
    points = {point.name: point.value for point in metadata.entry_points(group="verl.plugins")}
    if points.get("equipoise") != "equipoise.trainer_hooks.on_verl":
        raise EquipoiseError(f"verl.plugins must list equipoise, got {points}; reinstall the package with pip")
    allowed = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if allowed != "auto" and "equipoise" not in [name.strip() for name in allowed.split(",")]:
        raise EquipoiseError(
            f"VERL_USE_EXTERNAL_PLUGINS must include equipoise, got {allowed!r}; unset it or add the name"
        )
    return "equipoise = equipoise.trainer_hooks.on_verl"


def check_hydra_group() -> str:
    """``+equipoise=default`` composes into verl's own configuration."""
    import hydra
    from omegaconf import DictConfig, OmegaConf

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=["+equipoise=default"])
    node = config.get("equipoise")
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    EquipoiseConfig.from_node(plain)
    return "+equipoise=default composes into verl.trainer.config"


def check_patch_points() -> str:
    """The functions that the hook replaces or relies on match the tested ones."""
    lines = _patches.changed_points()
    if lines:
        raise EquipoiseError("\n     ".join(["verl's code differs from the tested version:", *lines]))
    return f"{len(_patches.POINTS) + len(_patches.ROLLOUT_POINTS)} verl functions match the tested ones"


def check_attached() -> str:
    """Verl has loaded the plugin: its trainer and its engines' ``prepare_micro_batches`` are wrapped."""
    for module, name in (("verl.trainer.ppo.v1.trainer_base", "PPOTrainer"), ("verl.workers.engine.utils", "")):
        loaded = importlib.import_module(module)
        function = getattr(loaded, name).__init__ if name else loaded.__dict__["prepare_micro_batches"]
        if not hasattr(function, "__wrapped__"):
            raise EquipoiseError(
                f"{module} must be wrapped after `import verl`, got {function}; is the plugin filtered out?"
            )
    return "PPOTrainer and prepare_micro_batches"
