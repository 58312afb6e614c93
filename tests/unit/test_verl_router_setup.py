"""How the router gets into verl's rollout, and verl's own classes around it."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.config import EquipoiseConfig
from equipoise.errors import InvalidConfig
from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_environment
from tests.integration.verl_rig import lighter
from tests.unit.router_sim import routed


@pytest.mark.slow
def test_a_gpu_run_never_imports_the_cpu_rig() -> None:
    """In a process of its own: what verl, Ray and Hydra load by name is loaded too, not only what modules import."""
    code = """
import importlib, pkgutil, sys
from equipoise.trainer_hooks import on_verl

for module in pkgutil.walk_packages(on_verl.__path__, on_verl.__name__ + "."):
    importlib.import_module(module.name)
print("loaded", *sorted(name for name in sys.modules if "verl_on_cpu" in name))
"""
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none", "PYTHONWARNINGS": "ignore"}
    environment.pop("VERL_PLATFORM", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["loaded"], done.stderr[-2000:]


def verl_config(**rollout: Any) -> Any:
    from omegaconf import OmegaConf

    keys = {"router_config_path": None, "full_determinism": False, **rollout}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": keys}})
    OmegaConf.set_struct(config, True)
    return config


def test_the_router_is_named_only_when_it_is_asked_for() -> None:
    from equipoise.trainer_hooks.on_verl.router.setup import choose_router, router_file

    for node, path in (
        ({}, None),
        ({"rollout": {"enable": True}}, router_file()),
        ({"enable": False, "rollout": {"enable": True}}, None),
    ):
        config = verl_config()
        choose_router(config, EquipoiseConfig.from_node(node))
        assert config.actor_rollout_ref.rollout.router_config_path == path


@pytest.mark.parametrize(
    ("rollout_keys", "node", "words"),
    [
        ({"router_config_path": "mine.yaml"}, {}, ["rollout.router_config_path", "'mine.yaml'"]),
        ({"full_determinism": True}, {}, ["rollout.full_determinism", "True", "equipoise.rollout.enable"]),
        ({"name": "vllm"}, {"transfer": "kv"}, ["equipoise.rollout.transfer", "'kv'", "rollout.name=vllm"]),
    ],
)
def test_what_excludes_the_router_is_refused_by_name(
    rollout_keys: dict[str, Any], node: dict[str, Any], words: list[str]
) -> None:
    from equipoise.trainer_hooks.on_verl.router.setup import choose_router

    with pytest.raises(InvalidConfig) as caught:
        choose_router(verl_config(**rollout_keys), EquipoiseConfig.from_node({"rollout": {"enable": True, **node}}))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verls_own_classes_route_move_and_go_on_where_a_request_stopped(tmp_path: Path) -> None:
    """Ray, verl's router loader and clients, two real servers: tokens are those of a run in which nothing moved."""
    environment = lighter({**cpu_environment(), "PYTHONWARNINGS": "ignore"})
    script = Path(__file__).with_name("router_ray.py")
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, stdout=log, stderr=log)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["unmoved"]["router"] == "TokenAwareRouter"
    assert found["unmoved"]["figures"]["equipoise/rollout/moves"] == 0
    unmoved = found["unmoved"]
    for name in ("MovingClient recompute", "MovingClient kv", "MovingAsyncClient recompute"):
        result, figures = found[name], found[name]["figures"]
        assert result["tokens"] == unmoved["tokens"], name
        assert result["log_probs"] == unmoved["log_probs"], name  # to the bit
        assert figures["equipoise/rollout/moves"] >= 1
        assert (figures["equipoise/rollout/kv_bytes"] > 0) == name.endswith("kv")
        assert figures["equipoise/rollout/length_error"] >= 0
        # verl's client for partial rollouts says so of a response that has its limit
        assert set(result["stop_reasons"]) == {"length" if "Async" in name else "completed"}
        assert result["inflight"] == 0
    assert sum(found["prefilled"]) == 0  # tokens that were computed again where caches were sent


def test_unknown_router_settings_name_the_nearest_legal_one() -> None:
    with pytest.raises(InvalidConfig, match=r"check_intervall.*'check_interval'"):
        routed(1, check_intervall=3)


@pytest.mark.parametrize("settings", [{"response_length": 0}, {"max_num_seqs": "8"}, {"max_prompts": 0}])
def test_router_settings_must_be_counts(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(InvalidConfig, match=f"{name}.*{value!r}"):
        routed(1, **settings)
