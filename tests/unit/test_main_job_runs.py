"""The main job from start to end, with a stub in verl's place."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false
# psutil ships no types.

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from examples.main_job import job
from examples.main_job.presets import PRESETS
from tests.unit.main_job_lines import append, metrics_line, record_line

pytestmark = pytest.mark.slow

STUB = """
import json, os, signal, subprocess, sys, time
folder, ending = sys.argv[1:]
record, metrics = (json.loads(line) for line in open(folder + "/lines.json"))
daemon = "import os, time; os.setsid(); os.fork(); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
print("Training Progress: 0%", flush=True)
for number in (1, 2):
    with open(folder + "/plans.jsonl", "a") as file:
        print(json.dumps({**record, "step": number}), file=file)
    time.sleep(0.6)
    with open(folder + "/metrics.jsonl", "a") as file:
        print(json.dumps({**metrics, "step": number}), file=file)
if ending == "fails":
    print("the last words", flush=True)
    os._exit(3)
if ending == "hangs":
    print("waiting", flush=True)
    time.sleep(600)
"""


class Harness:
    """Runs the job with a stub in verl's place that leaves a daemon behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.monkeypatch = monkeypatch
        self.outputs = tmp_path / "outputs"
        self.stub = tmp_path / "stub.py"
        self.stub.write_text(STUB)
        self.out = io.StringIO()
        self.strangers = set(psutil.Process().children(recursive=True))  # of earlier tests: a fork server stays

    def run(self, ending: str) -> int:
        def command(*_: object, folder: Path, **__: object) -> list[str]:
            append(folder / "lines.json", record_line(0), metrics_line(0, 2.0))
            return [sys.executable, str(self.stub), str(folder), ending]

        self.monkeypatch.setattr(job, "verl_command", command)
        self.monkeypatch.setattr(job, "plan_inputs", lambda *_, **__: (None, []))
        options = job.Options(preset=PRESETS["tiny"], steps=2, seed=1, output_dir=self.outputs)
        return job.run(options, Console(file=self.out, width=100))

    def summary(self) -> dict[str, Any]:
        return json.loads((self.outputs / "latest" / "summary.json").read_text())

    def left_behind(self) -> list[psutil.Process]:
        now = psutil.Process().children(recursive=True)
        return [process for process in now if process not in self.strangers and process.is_running()]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Harness:
    return Harness(monkeypatch, tmp_path)


def test_a_run_ends_with_table_picture_and_summary(harness: Harness):
    assert harness.run("ends") == 0
    assert harness.left_behind() == []
    text = harness.out.getvalue()
    assert "step 2 · reward 0.25 · 7 rows, 280 tokens" in text
    assert "2 steps in 0 min" in text
    assert {"table.md", "loads.png", "summary.json", "verl.log"} <= {
        path.name for path in (harness.outputs / "latest").iterdir()
    }
    assert harness.summary()["complete"] is True


def test_a_failure_shows_the_end_of_the_log_and_keeps_the_steps(harness: Harness):
    assert harness.run("fails") == 1
    assert harness.left_behind() == []
    text = harness.out.getvalue()
    assert "the last words" in text
    assert "verl failed: it ended with exit code 3" in text
    assert str(harness.outputs) in text
    assert (harness.summary()["steps"], harness.summary()["complete"]) == (2, False)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process_and_keeps_the_steps(harness: Harness, name: signal.Signals):
    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            log = harness.outputs / "latest" / "verl.log"
            if log.exists() and "waiting" in log.read_text():
                break
            time.sleep(0.1)
        os.kill(os.getpid(), name)

    threading.Thread(target=interrupt).start()
    assert harness.run("hangs") == 128 + name
    assert harness.left_behind() == []
    text = harness.out.getvalue()
    assert f"Stopped by {'Ctrl-C' if name is signal.SIGINT else 'SIGTERM'} after 2 of 2 steps" in text
    assert "none is left behind" in text
    assert harness.summary()["steps"] == 2


def test_a_dead_worker_ends_a_run_that_would_wait_for_ever(harness: Harness, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "_FATAL_GRACE_S", 0.5)
    harness.stub.write_text(STUB.replace('"waiting"', '"ActorDiedError"'))
    assert harness.run("hangs") == 1
    assert "one of its workers died" in harness.out.getvalue()
    assert harness.left_behind() == []
