"""The end of a run: its files, and what the user reads last."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from examples.main_job.picture import draw
from examples.main_job.presets import NUM_RANKS, Preset
from examples.main_job.steps import Ledger, Step
from examples.main_job.table import CAPTION, markdown_table, rich_table, write_summary
from examples.main_job.watch import Log

_TAIL_LINES = 25


@dataclass(kw_only=True)
class Outcome:
    """How a command ended."""

    what: str = ""
    returncode: int | None = None
    """None when it had to be ended."""
    reason: str | None = None
    """Why it had to be ended, if it was not the user."""
    stopped: signal.Signals | None = None
    ended: int = 0
    """Processes that were still there and were ended."""
    left_behind: list[int] = field(default_factory=list[int])

    @property
    def well(self) -> bool:
        """It ended by itself and says that it did its work."""
        return self.returncode == 0 and self.stopped is None


def finish(
    console: Console,
    outcome: Outcome,
    preset: Preset,
    ledger: Ledger,
    log: Log,
    *,
    num_steps: int,
    seconds: float,
    peak_gb: float,
) -> int:
    """Write table, picture and summary of the steps that are over, say what happened; returns the exit code."""
    folder, steps = log.path.parent, ledger.done
    complete = outcome.well and len(steps) >= num_steps
    files = _write(folder, steps, preset, seconds=seconds, peak_gb=peak_gb, complete=complete)
    if steps:
        console.print(rich_table(steps, caption=CAPTION))
    if outcome.stopped is not None:
        name = "Ctrl-C" if outcome.stopped is signal.SIGINT else outcome.stopped.name
        console.print(f"Stopped by {name} after {len(steps)} of {num_steps} steps. {_gone(outcome)}")
    elif not outcome.well:
        _complain(console, outcome, log)
    elif not complete:
        console.print(f"verl ended after {len(steps)} of {num_steps} steps; its log may say why.", style="yellow")
    minutes = f"{int(seconds) // 60} min {int(seconds) % 60} s"
    console.print(f"{len(steps)} steps in {minutes}, {peak_gb:.1f} GB of memory at most.", highlight=False)
    for text, path in files.items():
        console.print(f"{text:8} {_short(path)}", highlight=False, soft_wrap=True)
    if outcome.stopped is not None:
        return 128 + outcome.stopped
    return 0 if complete else 1


def _write(
    folder: Path, steps: Sequence[Step], preset: Preset, *, seconds: float, peak_gb: float, complete: bool
) -> dict[str, Path]:
    title = f"GRPO on {preset.title} with verl 0.9.1, {NUM_RANKS} CPU ranks"
    files = {"table": folder / "table.md", "picture": folder / "loads.png", "summary": folder / "summary.json"}
    files["table"].write_text(markdown_table(steps, title=title))
    write_summary(files["summary"], steps, model=preset.name, seconds=seconds, memory_gb=peak_gb, complete=complete)
    if not draw(files["picture"], steps, title=f"Who works and who waits: {title}"):
        del files["picture"]
    return {**files, "log": folder / "verl.log"}


def _complain(console: Console, outcome: Outcome, log: Log) -> None:
    how = outcome.reason or f"it ended with exit code {outcome.returncode}"
    console.rule(f"the end of {_short(log.path)}", style="red")
    for line in log.tail(_TAIL_LINES):
        console.print(Text(line), soft_wrap=True)
    console.rule(style="red")
    console.print(f"[red bold]{outcome.what} failed:[/] {how}. {_gone(outcome)}", highlight=False, soft_wrap=True)


def _gone(outcome: Outcome) -> str:
    if outcome.left_behind:
        return f"These processes could not be ended: {', '.join(map(str, outcome.left_behind))}."
    return f"Its {outcome.ended} processes were ended; none is left behind." if outcome.ended else "No process is left."


def _short(path: Path) -> str:
    """The path from here, if that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
