"""A hang is told by what happens, not by the clock."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration import family
from tests.integration.family import Stalled, run_patiently
from tests.integration.verl_rig import run_verl

pytestmark = pytest.mark.slow
SILENT = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"


def run(code: str, *, limit_s: float = 200.0) -> str:
    return run_patiently([sys.executable, "-c", code], cwd=Path(), env=os.environ, stall_s=4, limit_s=limit_s).stdout


@pytest.fixture(autouse=True)
def little_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_WORK_S", 0.05)


def test_what_sleeps_silently_is_ended_with_all_that_it_started() -> None:
    begin = time.monotonic()
    with pytest.raises(Stalled, match=r"(?s)nothing was logged .* for \d+ s.*before it\nPID") as caught:
        run(f"{SILENT}; print('before it'); print('PID', p.pid, flush=True); time.sleep(600)")
    assert time.monotonic() - begin < 100
    found = re.search(r"PID (\d+)", str(caught.value))
    assert found is not None
    assert not psutil.pid_exists(int(found[1]))


@pytest.mark.parametrize(
    "code",
    [
        "import time; end = time.monotonic() + 7\nwhile time.monotonic() < end: pass",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])",
        "import time\nfor _ in range(14): time.sleep(0.5); print('still here', flush=True)",
    ],
    ids=["works", "child works", "logs"],
)
def test_what_is_slow_but_works_or_logs_is_left_alone(code: str) -> None:
    work = "import time; end = time.monotonic() + 7\nwhile time.monotonic() < end: pass"
    assert "Traceback" not in run(code.replace("{work!r}", repr(work)))


def test_what_works_for_ever_is_ended_by_the_limit() -> None:
    with pytest.raises(Stalled, match="not done after 4 s"):
        run("while True: pass", limit_s=4)


def test_a_failure_shows_what_was_printed() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1\n.*ValueError: no luck"):
        run("raise ValueError('no luck')")


@pytest.mark.parametrize(
    ("line", "starts", "ends_well"),
    [
        ("DistNetworkError: The server socket has failed to listen on any address. name: EADDRINUSE", 2, True),
        ("ValueError: no luck", 1, False),
    ],
)
def test_verl_starts_again_where_its_port_was_taken_and_nowhere_else(
    tmp_path: Path, line: str, starts: int, ends_well: bool
) -> None:
    script = tmp_path / "unlucky_at_first.sh"
    script.write_text(f"echo start >> starts\n[ $(wc -l < starts) -gt 1 ] || {{ echo '{line}'; exit 1; }}\n")
    done = run_verl([], dp=1, cwd=tmp_path, script=script)
    assert (tmp_path / "starts").read_text().count("start") == starts
    assert (done.returncode == 0) == ends_well
