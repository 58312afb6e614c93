"""The examples, run as a user would run them."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# psutil ships no types.

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.family import LIMIT_S, run_patiently
from tests.integration.verl_rig import lighter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MAIN_JOB = [sys.executable, "-m", "examples.main_job", "--model", "tiny", "--plain"]
VARIABLES = {
    "MODEL": "actor_rollout_ref.model.path",
    "TRAIN": "data.train_files",
    "VAL": "data.val_files",
    "NODES": "trainer.nnodes",
    "GPUS": "trainer.n_gpus_per_node",
    "ROLLOUT_TP": "rollout.tensor_model_parallel_size",
    "PROMPTS": "data.train_batch_size",
    "MINI_BATCH": "actor.ppo_mini_batch_size",
    "MAX_PROMPT": "data.max_prompt_length",
    "MAX_RESPONSE": "data.max_response_length",
    "MAX_TOKENS": "actor.ppo_max_token_len_per_gpu",
}
"""What a script reads from the environment, and the setting of verl's that it becomes."""


def ray_processes() -> dict[int, str]:
    """Ray's daemons and workers of this machine, by process id."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        try:
            name = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "ray::" in name or "raylet" in name or "gcs_server" in name:
            found[process.pid] = name
    return found


def of_session(folder: str) -> list[str]:
    """Those that mention a temporary folder of one Ray session."""
    return [name for name in ray_processes().values() if folder in name]


def test_the_tiny_job_trains_and_sums_up(tmp_path: Path):
    job = run_patiently([*MAIN_JOB, "--steps", "2", "--output-dir", str(tmp_path)], cwd=ROOT, env=lighter(os.environ))
    latest = tmp_path / "latest"
    summary: dict[str, Any] = json.loads((latest / "summary.json").read_text())
    assert (summary["model"], summary["steps"], summary["complete"]) == ("tiny", 2, True)
    assert all(1.0 <= value < 1.3 for value in summary["lockstep_over_bound"])
    assert all(value >= 1.0 for value in summary["lockstep_over_bound_verl"])
    assert 0 < max(summary["max_tokens"]) <= summary["cap"]
    assert all(value > 0 for value in summary["update_seconds"])
    assert (latest / "loads.png").read_bytes().startswith(b"\x89PNG")
    assert "over bound, verl 0.9.1" in (latest / "table.md").read_text()
    assert "2 steps in" in job.stdout


def test_ctrl_c_while_verl_trains_leaves_no_process(tmp_path: Path):
    job = subprocess.Popen(
        [*MAIN_JOB, "--steps", "500", "--output-dir", str(tmp_path)],
        cwd=ROOT,
        env=lighter(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        metrics = tmp_path / "latest" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        family = psutil.Process(job.pid).children(recursive=True)
        session = next(
            match[0] for process in family if (match := re.search(r"/tmp/eq[^/\s]+", " ".join(process.cmdline())))
        )
        assert of_session(session)
        job.send_signal(signal.SIGINT)
        text, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGINT
    said = " ".join(text.split())  # the console wraps its lines
    assert "Stopped by Ctrl-C after" in said
    assert "none is left behind" in said
    assert of_session(session) == []
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert not Path(session).exists()
    assert json.loads((tmp_path / "latest" / "summary.json").read_text())["steps"] >= 1


def test_a_setting_that_verl_refuses_is_shown(tmp_path: Path):
    command = [*MAIN_JOB, "--output-dir", str(tmp_path), "--", "equipoise.algoritm=kk"]
    job = run_patiently(command, cwd=ROOT, env=os.environ, check=False)
    assert job.returncode == 1
    assert "verl failed" in job.stdout
    assert "algoritm" in job.stdout
    assert "verl.log" in job.stdout


@pytest.mark.parametrize(
    ("name", "more"), [("grpo", {"SAMPLES": "rollout.n"}), ("ppo", {"CRITIC_MINI_BATCH": "critic.ppo_mini_batch_size"})]
)
def test_variables_of_the_scripts_reach_verl(name: str, more: dict[str, str]):
    """How verl trains when a script starts it is tested in ``test_verl_end_to_end``."""
    settings = VARIABLES | more
    values = {variable: f"{number}1" for number, variable in enumerate(settings)}
    script = ROOT / "examples" / name / "run.sh"
    command = ["bash", str(script), "trainer.last=1"]
    printed = subprocess.run(command, env=os.environ | values | {"PYTHON": "echo"}, stdout=subprocess.PIPE, text=True)
    words = printed.stdout.split()
    assert words[:3] == ["-m", "verl.trainer.main_ppo", "+equipoise=default"]
    assert words[-1] == "trainer.last=1"
    for variable, key in settings.items():
        assert any(word.endswith(f"{key}={values[variable]}") for word in words), variable


def test_the_planner_alone_prints_a_plan():
    run = subprocess.run(
        [sys.executable, "-m", "examples.plan_from_python"],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ratio = re.search(r"every micro-batch: (\d\.\d+) of the bound", run.stdout)
    assert ratio is not None
    assert 1.0 <= float(ratio[1]) < 1.05
    assert "balance/" in run.stdout
    assert len((ROOT / "examples" / "plan_from_python.py").read_text().splitlines()) < 40
