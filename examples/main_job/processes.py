"""Start a command and be able to end everything that descends from it.

Ray's daemons and workers leave the session of whoever started them and outlive it, so neither a process group nor the
parents' tree finds them once the driver is gone. On Linux this process therefore becomes the one that orphans below it
are handed to: whatever happens above them, they stay its descendants.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# psutil ships no types.

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_GIVE_UP_S = 30.0


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends; nothing where the system cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Family:
    """A command and all its descendants.

    Args:
        command: program and arguments.
        log: file that gets all output, appended.
        env: whole environment.
        cwd: folder to run in.
    """

    def __init__(self, command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path) -> None:
        adopt_orphans()
        self._strangers = {process.pid for process in psutil.Process().children(recursive=True)}
        self._seen: dict[int, psutil.Process] = {}
        self._ray = Path(tempfile.mkdtemp(prefix="eq", dir="/tmp"))  # short: Ray puts Unix sockets below it
        with log.open("ab") as out:
            self._root = subprocess.Popen(
                list(command),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**env, "RAY_TMPDIR": str(self._ray)},
                cwd=cwd,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others in order
            )

    def poll(self) -> int | None:
        """Return code of the command, None while it runs."""
        return self._root.poll()

    def members(self) -> list[psutil.Process]:
        """The command and its descendants that are still there; those that only wait to be reaped are not."""
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self._strangers:
                self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if _is_there(process)]

    def memory_gb(self) -> float:
        """Memory of all members, shared pages divided among those that share them (PSS)."""
        return sum(map(_pss, self.members())) / 1e9

    @staticmethod
    def own_memory_gb() -> float:
        """Memory of this process, counted likewise."""
        return _pss(psutil.Process()) / 1e9

    def end(self) -> list[psutil.Process]:
        """Kill what is left, wait until it is gone and remove Ray's temporary files; returns what would not go."""
        if self._root.poll() is None:
            os.killpg(self._root.pid, signal.SIGKILL)
            self._root.wait()
        deadline = time.monotonic() + _GIVE_UP_S
        while (alive := self.members()) and time.monotonic() < deadline:
            for process in alive:
                try:
                    process.kill()  # psutil compares start times, so that a reused number is safe
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(alive, timeout=2)  # another round: a daemon may have started a worker meanwhile
        self._reap()
        shutil.rmtree(self._ray, ignore_errors=True)
        return alive

    def _reap(self) -> None:
        """Take note of the deaths of adopted orphans, which would stay in the process table until this process ends."""
        for pid in self._seen.keys() - {self._root.pid}:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # its own parent, or psutil, has done so
                pass


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _pss(process: psutil.Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:  # it ended, or this is not Linux
        return 0
    return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
