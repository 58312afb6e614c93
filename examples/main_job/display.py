"""What is on the screen while the job runs: progress, the steps so far, and who works and who waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.main_job.steps import Planned, Step
from examples.main_job.table import rich_table

_OTHER_LINES = 20
_WORK = ("bright_blue", "cyan")
_WAIT = "yellow"


@dataclass(frozen=True, kw_only=True)
class View:
    """All that one frame shows."""

    title: str
    task: str
    phase: str
    """What is going on, for people to read."""
    steps: Sequence[Step]
    num_steps: int
    fraction: float
    """Part of the expected time that is over."""
    elapsed_s: float
    left_s: float | None
    """None when it is not known."""
    memory_gb: float
    peak_gb: float
    log: str


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(75.4)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def render(view: View, *, width: int, height: int) -> RenderableType:
    """One frame for a terminal of ``width`` columns and ``height`` lines; where they are few, old steps go first."""
    inner = max(20, width - 6)
    parts: list[RenderableType] = [_progress(view), Text()]
    shown = view.steps[-max(1, height - _OTHER_LINES) :]
    if shown:
        parts += [rich_table(shown), Text()]
    latest = next((step for step in reversed(shown) if step.planned is not None), None)
    if latest is not None and latest.planned is not None:
        parts += [_loads(latest, latest.planned, inner), Text()]
    parts.append(Text(f"{view.memory_gb:.1f} GB of memory, {view.peak_gb:.1f} at most · log: {view.log}", style="dim"))
    parts.append(Text("Ctrl-C ends verl and Ray and keeps what there is", style="dim"))
    return Panel(
        Group(*parts), title=Text(view.title, style="bold"), subtitle=Text(view.task, style="dim"), width=width
    )


def plain(step: Step) -> str:
    """One line about a step that is over, for where there is no terminal."""
    verl, planned = step.over_bound_verl, step.over_bound
    return " · ".join(
        [
            f"step {step.number}",
            "reward –" if step.reward is None else f"reward {step.reward:.2f}",
            "no plan" if step.planned is None else f"{len(step.planned.real)} rows, {sum(step.planned.real):,} tokens",
            "over bound " + " -> ".join("–" if value is None else f"{value:.3f}" for value in (verl, planned)),
            "" if step.update_s is None else f"update {step.update_s:.1f} s",
        ]
    )


def _progress(view: View) -> RenderableType:
    done = sum(step.update_s is not None for step in view.steps)
    left = "" if view.left_s is None else f", about {clock(view.left_s)} left"
    words = Text.assemble(
        (f"{done} of {view.num_steps} steps", "bold"), f" · {view.phase} · {clock(view.elapsed_s)} gone{left}"
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=1.0, completed=min(1.0, view.fraction), width=14), words)
    return grid


def _loads(step: Step, planned: Planned, width: int) -> RenderableType:
    """Bars of each rank before and after, to one scale, so that a shorter bar is a shorter step."""
    before = None if step.verl is None else planned.meetings(step.verl)
    after = planned.meetings(planned.micro_batches)
    longest = max(_span(plan) for plan in (before, after) if plan is not None)
    label = 26
    scale = max(10, width - label - 8) / longest
    head = Text.assemble(
        (f"Step {step.number}: ", "bold"),
        "who works ",
        ("█", _WORK[0]),
        ("█", _WORK[1]),
        " (a shade a micro-batch), who waits ",
        ("░", _WAIT),
        ", │ optimizer step",
    )
    grid = Table.grid(padding=(0, 1))
    for name, plan, over in (
        ("as verl 0.9.1 would", before, step.over_bound_verl),
        ("as planned", after, step.over_bound),
    ):
        for rank in range(planned.dp_size):
            ratio = "" if rank or over is None else f"{over:.3f}"
            bar = Text("…", style="dim") if plan is None else _bar(plan, rank, scale)
            grid.add_row(Text(f"{name if not rank else '':19} rank {rank}"), bar, Text(ratio, style="bold"))
    return Group(head, grid)


def _span(meetings: Sequence[Sequence[Sequence[float]]]) -> float:
    return sum(max(meeting) for step in meetings for meeting in step)


def _bar(meetings: Sequence[Sequence[Sequence[float]]], rank: int, scale: float) -> Text:
    """One rank's bar; edges are rounded from the start of the bar, so that they do not drift apart over the ranks."""
    bar = Text()
    left = 0.0
    shade = 0
    for step in meetings:
        for meeting in step:
            right = left + max(meeting)
            stop = left + meeting[rank]
            bar.append("█" * (round(stop * scale) - round(left * scale)), style=_WORK[shade % 2])
            bar.append("░" * (round(right * scale) - round(stop * scale)), style=_WAIT)
            left, shade = right, shade + 1
        bar.append("│", style="bold")
    return bar
