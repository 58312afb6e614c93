"""The table and the numbers that a run ends with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from examples.main_job.steps import Step

CAPTION = (
    "over bound: what a step costs where both ranks meet at every micro-batch, over the least that any plan could "
    "cost (1.00); verl 0.9.1: its own functions on the same lengths. predicted: the planned cost times the seconds "
    "per unit of cost of this run's earlier steps."
)
_BLANK = "–"


def _number(value: float | None, digits: int) -> str:
    return _BLANK if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return _BLANK if value is None else f"{value:,}"


@dataclass(frozen=True, kw_only=True)
class _Column:
    """One column: its head in a narrow table, its name where there is room, and what is in it."""

    head: str
    name: str
    cell: Callable[[Step], str]


_COLUMNS = (
    _Column(head="step", name="step", cell=lambda s: str(s.number)),
    _Column(head="reward", name="reward", cell=lambda s: _number(s.reward, 2)),
    _Column(head="rows", name="rows", cell=lambda s: _count(s.planned and len(s.planned.real))),
    _Column(head="tokens", name="tokens", cell=lambda s: _count(s.planned and sum(s.planned.real))),
    _Column(head="response\nmin/mean/max", name="response min/mean/max", cell=lambda s: _lengths(s)),
    _Column(head="over\nbound,\nverl", name="over bound, verl 0.9.1", cell=lambda s: _number(s.over_bound_verl, 3)),
    _Column(head="over\nbound,\nplan", name="over bound, as planned", cell=lambda s: _number(s.over_bound, 3)),
    _Column(head="update,\npredicted\n(s)", name="update predicted (s)", cell=lambda s: _number(s.predicted_s, 1)),
    _Column(head="update,\nmeasured\n(s)", name="update measured (s)", cell=lambda s: _number(s.update_s, 1)),
    _Column(head="step\n(s)", name="step (s)", cell=lambda s: _number(s.metric("timing_s/step"), 1)),
)


def _lengths(step: Step) -> str:
    low, mean, high = (step.metric(f"response_length/{name}") for name in ("min", "mean", "max"))
    return _BLANK if low is None or mean is None or high is None else f"{low:.0f}/{mean:.0f}/{high:.0f}"


def rich_table(steps: Sequence[Step], *, caption: str | None = None) -> Table:
    """The steps as a table for a terminal of 80 columns or more."""
    table = Table(
        caption=caption, caption_justify="left", header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=0
    )
    for column in _COLUMNS:
        table.add_column(column.head, justify="right", vertical="bottom", no_wrap=True)
    for step in steps:
        table.add_row(*(column.cell(step) for column in _COLUMNS))
    return table


def markdown_table(steps: Sequence[Step], *, title: str) -> str:
    """The same table as text that reads well unrendered."""
    rows = [[column.name for column in _COLUMNS], *([column.cell(step) for column in _COLUMNS] for step in steps)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return f"# {title}\n\n" + "\n".join(lines) + f"\n\n{CAPTION}\n"


def write_summary(
    path: Path, steps: Sequence[Step], *, model: str, seconds: float, memory_gb: float, complete: bool
) -> None:
    """Write the run as JSON; each list has one entry a step that is over, null where a number is not known."""
    planned = [step.planned for step in steps]
    summary = {
        "model": model,
        "steps": len(steps),
        "reward": [step.reward for step in steps],
        "lockstep_over_bound": [step.over_bound for step in steps],
        "lockstep_over_bound_verl": [step.over_bound_verl for step in steps],
        "max_tokens": [plan and plan.max_tokens for plan in planned],
        "cap": next((plan.cap for plan in planned if plan is not None), None),
        "seconds": seconds,
        "complete": complete,
        "peak_memory_gb": memory_gb,
        "rows": [plan and len(plan.real) for plan in planned],
        "tokens": [plan and sum(plan.real) for plan in planned],
        "update_seconds": [step.update_s for step in steps],
        "predicted_update_seconds": [step.predicted_s for step in steps],
        "step_seconds": [step.metric("timing_s/step") for step in steps],
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")
