"""Runs test files in a copy of the tree, in a forked process that has the large libraries loaded already."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_LIBRARIES = ("numpy", "torch", "tensordict", "transformers", "scipy.optimize")
_IGNORED = shutil.ignore_patterns(".git", ".venv", ".cache", "outputs", "build", "dist", "__pycache__", ".*_cache")
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run of tests ended."""

    code: int | None
    """pytest's exit code; None where the run was killed by its time limit."""
    seconds: float
    log: str


class Trial:
    """A copy of the tree whose tests are run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self._log = folder / "log"
        shutil.copytree(root, self.root, symlinks=True, ignore=_IGNORED)
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self.root / "plugin"),
            "VERL_USE_EXTERNAL_PLUGINS": "none",
        }
        for name in _LIBRARIES:
            importlib.import_module(name)
        loaded = [name for name in sys.modules if name.partition(".")[0] == "equipoise"]
        assert not loaded, f"a library has imported {loaded[0]}: the copy's would not be seen"
        del os.environ["VERL_USE_EXTERNAL_PLUGINS"]

    @contextmanager
    def changed(self, path: Path, source: str) -> Generator[None]:
        """The copy with another text of one file, by its path in the tree."""
        file = self.root / path
        before = file.read_text()
        file.write_text(source)
        try:
            yield
        finally:
            file.write_text(before)

    def run(self, tests: Sequence[Path], *, slow: bool = False, limit_s: float) -> Outcome:
        """The quick tests of some files, or the slow ones, up to the first that fails."""
        begin = time.monotonic()
        child = _FORK.Process(target=self._tests, args=([str(self.root / test) for test in tests], slow))
        child.start()
        child.join(limit_s)
        code = child.exitcode
        assert child.pid is not None
        try:
            os.killpg(child.pid, signal.SIGKILL)  # also what the tests left behind
        except ProcessLookupError:
            pass
        child.join()
        return Outcome(code=code, seconds=time.monotonic() - begin, log=self._log.read_text(errors="replace"))

    def _tests(self, tests: list[str], slow: bool) -> None:
        os.setsid()
        with self._log.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(self.root)
        sys.path[:] = [str(self.root), str(self.root / "plugin"), *sys.path[1:]]
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]
        config = ["-c", str(self.root / "pyproject.toml"), "-p", "no:cacheprovider", "-n", "0"]
        # libraries that bring plugins for pytest are loaded before it
        quiet = ["-q", "--tb", "line", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*config, *quiet, "-x", "-m", "slow" if slow else "not slow", *tests])
        sys.stdout.flush()
        os._exit(code)
