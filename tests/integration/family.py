"""Processes that are ended when nothing happens in them, however long they take where something does."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# psutil ships no types.

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

STALL_S = 180.0
"""With neither a line in the log nor work in any process for so long, a run hangs."""
LIMIT_S = 900.0
"""For what hangs busily. pytest's own limit lies above it (``timeout`` in pyproject.toml)."""
# Processor time of one process that counts as work: in STALL_S, no process of an idle Ray takes 3 s, and one that works
# beside 50 others on two cores gets 7 s.
_WORK_S = 5.0
_POLL_S = 0.5
_MARK = "EQUIPOISE_TEST_FAMILY"


class Stalled(RuntimeError):
    """A run was ended because nothing happened in it."""


class Family:
    """A command and all that descends from it, also what left its session or lost its parent.

    Args:
        command: program and arguments.
        log: file for its output.
        cwd: folder to run in.
        env: its whole environment.
    """

    def __init__(self, command: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self._mark = uuid.uuid4().hex
        self._seen: dict[int, psutil.Process] = {}
        self._alive_at = time.monotonic()
        self._size = 0
        self._worked: dict[int, float] = {}
        with log.open("w") as out:
            self.root = subprocess.Popen(
                list(command),
                cwd=cwd,
                env={**env, _MARK: self._mark},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(
        self,
        *,
        stall_s: float = STALL_S,
        limit_s: float = LIMIT_S,
        fatal: re.Pattern[str] | None = None,
        grace_s: float = 20.0,
    ) -> int | None:
        """Return code; None where it had not ended ``grace_s`` after a line that matches ``fatal``.

        Raises:
            Stalled: for ``stall_s`` neither did the log grow nor did a process work, or ``limit_s`` have passed.
        """
        begin = time.monotonic()
        deadline = None
        read = 0
        while True:
            try:
                return self.root.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                pass
            with self.log.open(errors="replace") as file:
                file.seek(read)
                text = file.read()
                read = file.tell()
            now = time.monotonic()
            if deadline is None and fatal is not None and fatal.search(text):
                deadline = now + grace_s
            if deadline is not None and now > deadline:
                return None
            idle_s = self._idle_s(now)
            if idle_s > stall_s:
                raise Stalled(f"nothing was logged and no process worked for {idle_s:.0f} s{self._told()}")
            if now - begin > limit_s:
                raise Stalled(f"not done after {limit_s:.0f} s, though something still happens{self._told()}")

    def kill(self) -> None:
        """Kill them all and wait until they are gone."""
        self._look()
        if self.root.poll() is None:
            os.killpg(self.root.pid, signal.SIGKILL)
            self.root.wait()
        for _ in range(5):  # a daemon may have started a worker in the meantime
            alive = [process for process in {**self._seen, **self._marked()}.values() if process.is_running()]
            if not alive:
                return
            for process in alive:
                try:
                    process.kill()  # psutil checks the start time, so that a reused number is safe
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(alive, timeout=5)

    def _idle_s(self, now: float) -> float:
        """Seconds since the log grew or one of the processes had worked for some time."""
        self._look()
        size = self.log.stat().st_size
        worked = {pid: _processor_s(process) for pid, process in self._seen.items()}
        if size != self._size or any(s - self._worked.get(pid, 0.0) > _WORK_S for pid, s in worked.items()):
            self._alive_at, self._size, self._worked = now, size, worked
        return now - self._alive_at

    def _look(self) -> None:
        """Remember the descendants of now: once their parent is gone, nothing leads to them."""
        try:
            root = psutil.Process(self.root.pid)
            for process in (root, *root.children(recursive=True)):
                self._seen.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass

    def _marked(self) -> dict[int, psutil.Process]:
        """Processes whose environment carries the mark of this family."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    found[process.pid] = process
            except psutil.Error:
                continue
        return found

    def _told(self) -> str:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])
        return f"; {self.log} ends\n{tail}"


def run_patiently(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    check: bool = True,
    stall_s: float = STALL_S,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` that waits for as long as something happens; ``stdout`` has both streams.

    Raises:
        Stalled: see :meth:`Family.wait`.
        RuntimeError: the command failed, and ``check`` is set.
    """
    with tempfile.TemporaryDirectory() as folder:
        family = Family(command, log=Path(folder) / "log", cwd=cwd, env=env)
        try:
            code = family.wait(stall_s=stall_s, limit_s=limit_s)
        finally:
            family.kill()
        text = family.log.read_text(errors="replace")
    assert code is not None
    if check and code != 0:
        raise RuntimeError(f"{' '.join(command[:6])} … ended with {code}\n{text[-4000:]}")
    return subprocess.CompletedProcess(list(command), code, text)


def _processor_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it is gone; what it has done was seen before
        return 0.0
    return times.user + times.system
