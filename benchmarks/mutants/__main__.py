"""Change the code of some rooms in one place at a time and tell which changes no test notices.

``python -m benchmarks.mutants`` takes a sample of the rooms where a fault costs most; ``python -m benchmarks.mutants
plugin/equipoise/training/loss --sample 60 --seed 1`` another of one room. The working tree is not touched.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.mutants.changes import Change, changes
from benchmarks.mutants.selection import files_concerning
from benchmarks.mutants.trial import Outcome, Trial

ROOT = Path(__file__).parents[2]
ROOMS = (
    "plugin/equipoise/planning/step",
    "plugin/equipoise/training/loss",
    "plugin/equipoise/training/engine",
    "plugin/equipoise/rollout/transfer",
    "trainer_hooks/on_verl",
)
PASSED, NO_TESTS = 0, 5


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one file."""

    room: str
    path: Path
    change: Change

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:60] for text in (self.change.before, self.change.after))
        return f"{self.path}:{self.change.line}  {before}  ->  {after}"


class Judge:
    """Tries mutants, each with the tests that concern it and pass on the tree as it is.

    Args:
        trial: that runs tests.
        slowest_s: test files that take longer are left out.
        console: to name those on.
    """

    def __init__(self, trial: Trial, *, slowest_s: float, console: Console) -> None:
        self._trial = trial
        self._slowest_s = slowest_s
        self._console = console
        self._seconds: dict[tuple[Path, bool], float | None] = {}

    def verdict(self, mutant: Mutant, *, slow: bool) -> tuple[str, Outcome]:
        """``killed``, ``timed out`` or ``survived``, and the run that tells; ``slow`` adds slow tests."""
        outcome = Outcome(code=NO_TESTS, seconds=0.0, log="")
        for kind in (False, True) if slow else (False,):
            tests = self._tests(mutant, slow=kind)
            if tests:
                with self._trial.changed(mutant.path, mutant.change.source):
                    outcome = self._trial.run(list(tests), slow=kind, limit_s=60 + 3 * sum(tests.values()))
            if outcome.code not in {PASSED, NO_TESTS}:
                return "timed out" if outcome.code is None else "killed", outcome
        return "survived", outcome

    def _tests(self, mutant: Mutant, *, slow: bool) -> dict[Path, float]:
        """Seconds that each test file takes unchanged, the quickest first."""
        found: dict[Path, float] = {}
        for test in files_concerning(self._trial.root, self._trial.root / mutant.path):
            file = test.relative_to(self._trial.root)
            if (file, slow) not in self._seconds:
                self._seconds[file, slow] = self._unchanged(file, slow=slow)
            seconds = self._seconds[file, slow]
            if seconds is not None:
                found[file] = seconds
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def _unchanged(self, file: Path, *, slow: bool) -> float | None:
        outcome = self._trial.run([file], slow=slow, limit_s=self._slowest_s)
        if outcome.code == PASSED:
            return outcome.seconds
        if outcome.code != NO_TESTS:
            why = f"takes over {self._slowest_s:.0f} s" if outcome.code is None else f"fails unchanged: {_by(outcome)}"
            self._console.print(f"left out: {file} {why}", markup=False, soft_wrap=True)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Try the mutants, print those that survive and a table; 0 if none does."""
    options = _parse(argv)
    console = Console()
    mutants = [mutant for room in options.rooms for mutant in sample(room, options.sample, options.seed)]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    counts: Counter[tuple[str, str]] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        Progress(*columns, console=console, auto_refresh=False) as progress,  # a thread would be forked with us
    ):
        trial = Trial(ROOT, Path(folder))
        judge = Judge(trial, slowest_s=options.slowest, console=progress.console)
        task = progress.add_task("", total=len(mutants))
        for mutant in mutants:
            progress.update(task, description=mutant.path.name, refresh=True)
            verdict, outcome = judge.verdict(mutant, slow=options.slow)
            counts[mutant.room, verdict] += 1
            if options.out:
                line = {"mutant": str(mutant), "verdict": verdict, "by": _by(outcome), "seconds": outcome.seconds}
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if verdict == "survived":
                progress.console.print(f"survived: {mutant}", markup=False, soft_wrap=True)
            progress.update(task, advance=1, refresh=True)
    console.print(_table(options.rooms, counts))
    return int(any(verdict == "survived" for _, verdict in counts))


def sample(room: str, size: int, seed: int) -> list[Mutant]:
    """Changes drawn from all of a room's files; the same for the same text and seed."""
    found = [
        Mutant(room=room, path=path.relative_to(ROOT), change=change)
        for path in sorted((ROOT / room).rglob("*.py"))
        for change in changes(path.read_text())
    ]
    drawn = random.Random(seed).sample(found, min(size, len(found)))
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.change.line))


def _by(outcome: Outcome) -> str:
    """The test that failed, or the last that was printed."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", outcome.log, re.MULTILINE)
    return found[1] if found else " ".join(outcome.log.splitlines()[-1:])


def _table(rooms: Sequence[str], counts: Counter[tuple[str, str]]) -> Table:
    table = Table("room", "mutants", "killed", "timed out", "survived")
    for room in rooms:
        row = [counts[room, verdict] for verdict in ("killed", "timed out", "survived")]
        table.add_row(room, *map(str, [sum(row), *row]))
    return table


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS, help="folders, from the root of the repository")
    parser.add_argument("--sample", type=int, default=30, help="mutants a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="try what survives the quick tests with the slow ones")
    parser.add_argument("--slowest", type=float, default=120, help="test files that take longer are left out (s)")
    parser.add_argument("--out", type=Path, help="file for a JSON line a mutant, with the test that killed it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
