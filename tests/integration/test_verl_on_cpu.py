"""verl on CPUs: what it registers and refuses. How it trains is tested in ``test_verl_end_to_end``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_environment
from tests.integration.verl_rig import lighter, run_verl, tiny_overrides

pytestmark = pytest.mark.slow


def test_a_server_error_ends_the_run_with_its_text(tmp_path: Path) -> None:
    run = run_verl([*tiny_overrides(steps=1), "actor_rollout_ref.rollout.top_p=2"], dp=1, cwd=tmp_path)
    assert run.returncode == 1
    assert re.search(r"InvalidInput: top_p .*got 2\b", run.log.read_text())


def _in_verl(code: str, **env: str) -> str:
    """What ``code`` prints in a process that has verl and this room."""
    environment = lighter({**cpu_environment(), "PYTHONWARNINGS": "ignore", **env})
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_registers_with_verl_and_refuses_a_sharded_rollout() -> None:
    code = """
import torch, verl
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import RolloutConfig
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

print(get_device_name(), get_device_id())
print(EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__, get_rollout_class("hf_cpu").__name__)
replica = get_rollout_replica_class("hf_cpu")
replica(0, RolloutConfig(name="hf_cpu", tensor_model_parallel_size=1), {}, gpus_per_node=2)
try:
    replica(0, RolloutConfig(name="hf_cpu", tensor_model_parallel_size=2), {}, gpus_per_node=2)
except ValueError as error:
    print(error)
try:
    EngineRegistry.get_engine_cls("language_model", "fsdp")
except ValueError as error:
    print(error)
"""
    lines = _in_verl(code).splitlines()[-4:]
    assert lines[:2] == ["cpu cpu", "FSDPEngineWithValueHead HFCPUAdapter"]
    assert re.match(r"rollout.tensor_model_parallel_size .*got 2", lines[2])
    assert lines[3].startswith("No engine registered for device='cpu'")  # verl's text


def test_a_batch_is_in_data_order_however_it_finished() -> None:
    code = """
import verl.trainer.ppo.v1.replay_buffer as module

buffer = module.ReplayBuffer("sync", {}, None, "drop", {})
print(buffer.poll_interval)
module.tq.kv_clear = lambda **_: None
buffer.prompt_global_steps["train"] = {"b": 1, "a": 1}
finished = ["a_1_0", "b_10_0", "a_0_0", "b_2_0", "c_0_0"]
print(*buffer._materialize_batch("train", ["a", "b"], {key: {"seq_len": 1} for key in finished}).keys)
"""
    assert _in_verl(code).splitlines()[-2:] == ["0.1", "b_2_0 b_10_0 a_0_0 a_1_0"]


def test_stands_aside_for_another_cpu_platform(tmp_path: Path) -> None:
    (tmp_path / "another_cpu.py").write_text(
        "from verl.plugin.platform.platform_cuda import PlatformCUDA\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "PlatformRegistry.register(platform='cpu')(type('Another', (PlatformCUDA,), {}))\n"
    )
    code = """
import verl, verl.workers.rollout.base as base
from verl.plugin.platform import PlatformRegistry

print(PlatformRegistry.get("cpu").__name__, ("hf_cpu", "async") in base._ROLLOUT_REGISTRY)
"""
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    output = _in_verl(code, VERL_USE_EXTERNAL_MODULES="another_cpu", PYTHONPATH=os.pathsep.join(path))
    assert output.splitlines()[-1] == "Another False"
