"""The examples as a user runs them: the command lines on a CPU, the planner alone, the main job and Ctrl-C."""

# psutil ships no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.verl_rig import Completed, run_verl, tiny, tiny_overrides

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 360


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Completed]:
    """Both command lines on two CPU ranks, at the same time."""
    folder = tmp_path_factory.mktemp("examples")
    env = {"PYTHON": sys.executable, "MODEL": str(tiny().model), "TRAIN": str(tiny().train), "VAL": str(tiny().val)}
    with ThreadPoolExecutor(max_workers=2) as threads:
        runs = {
            name: threads.submit(
                run_verl,
                tiny_overrides(steps=1),
                dp=2,
                timeout_s=LIMIT_S,
                cwd=folder / name,
                critic=name == "ppo",
                script=ROOT / "examples" / name / "run.sh",
                env=env,
            )
            for name in ("grpo", "ppo")
        }
        return {name: run.result().checked() for name, run in runs.items()}


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_command_lines_train_and_are_planned(examples: dict[str, Completed], name: str) -> None:
    run = examples[name]
    (row,) = [row for row in run.metrics if "actor/pg_loss" in row]
    assert math.isfinite(row["actor/grad_norm"])
    assert row["equipoise/lockstep_over_bound"] >= 1.0
    assert ("critic/vf_loss" in row) == (name == "ppo")
    assert "falling back" not in run.log.read_text(errors="replace")


def test_the_planner_runs_without_a_trainer() -> None:
    script = ROOT / "examples" / "plan_from_python.py"
    assert len(script.read_text().splitlines()) < 40
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "of the bound" in done.stdout
    assert "balance/lockstep_over_bound " in done.stdout


def main_job(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.main_job", "--model", "tiny", "--output-dir", str(out), "--plain"]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "EQUIPOISE_TEST_TAG": str(out)},
        start_new_session=True,
    )


def left_over(out: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("EQUIPOISE_TEST_TAG") == str(out) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_main_job_ends_with_a_table_a_picture_and_a_summary(tmp_path: Path) -> None:
    job = main_job(tmp_path, "--steps", "2")
    printed, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, printed[-2000:]
    latest = tmp_path / "latest"
    summary: dict[str, Any] = json.loads((latest / "summary.json").read_text())
    for key in ("reward", "lockstep_over_bound", "lockstep_over_bound_verl", "max_tokens"):
        assert len(summary[key]) == summary["steps"] == 2, key
    assert summary["model"] == "tiny"
    assert all(tokens <= summary["cap"] for tokens in summary["max_tokens"])
    assert all(value >= 1.0 for value in summary["lockstep_over_bound"])
    assert summary["seconds"] > 0
    pictures = list(latest.glob("*.png"))
    assert pictures
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
    assert (latest / "table.md").read_text().count("\n|") >= 3
    assert left_over(tmp_path) == []


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    job = main_job(tmp_path)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and len(left_over(tmp_path)) < 8:  # Ray is up and workers are starting
        time.sleep(0.5)
    assert len(left_over(tmp_path)) >= 8
    job.send_signal(signal.SIGINT)
    printed, _ = job.communicate(timeout=90)
    assert job.returncode not in (0, None)
    assert "stopped" in printed.lower() or "interrupt" in printed.lower(), printed[-800:]
    assert left_over(tmp_path) == []
