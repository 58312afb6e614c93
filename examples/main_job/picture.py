"""The picture that a run ends with: who works and who waits, as verl 0.9.1 would have had it and as it was planned."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# matplotlib is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.verl_rule import MicroBatches
from examples.main_job.steps import Planned, Step

MAX_STEPS = 8
_WORK = ("#1f5f8b", "#7fb2d6")  # neighbours differ, so that micro-batches can be told apart
_WAIT = "#f2d9c4"
_EDGE = "#c26a2d"


def draw(path: Path, steps: Sequence[Step], *, title: str) -> bool:
    """Draw the last steps that have both plans to ``path``; returns whether there were any."""
    pairs = [(step, step.planned, step.verl) for step in steps if step.planned is not None and step.verl is not None]
    pairs = pairs[-MAX_STEPS:]
    if not pairs:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12.5, 1.9 + 1.05 * len(pairs)), layout="constrained", dpi=140)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(pairs), 2, sharex=True, squeeze=False)
    right = 1.02 * max(max(step.over_bound or 1.0, step.over_bound_verl or 1.0) for step, _, _ in pairs)
    for row, (step, planned, verl) in enumerate(pairs):
        for axis, plan, over in (
            (axes[row][0], verl, step.over_bound_verl),
            (axes[row][1], planned.micro_batches, step.over_bound),
        ):
            _bars(axis, planned, plan, over or 1.0)
            axis.set_xlim(0, right)
        axes[row][0].set_ylabel(f"step {step.number}", fontweight="bold")
    for axis, name in zip(axes[0], ("verl 0.9.1 on its own", "planned by Equipoise (as run)"), strict=True):
        axis.set_title(name, fontsize=12, fontweight="bold")
    for axis in axes[-1]:
        axis.set_xlabel("cost, in units of the least possible for the step (dashed line)")
    figure.legend(
        handles=[
            Patch(color=_WORK[0], label="work: one bar a micro-batch"),
            Patch(facecolor=_WAIT, edgecolor=_EDGE, hatch="////", label="wait for the other rank"),
            Patch(facecolor="none", edgecolor="black", label="optimizer step (mini-batch)"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.suptitle(title, fontsize=13)
    figure.savefig(path)
    return True


def _bars(axis: Any, planned: Planned, plan: MicroBatches, over: float) -> None:
    """One plan: ranks from top to bottom, meetings from left to right, all ranks of a meeting in one column."""
    left = 0.0
    shade = 0
    for step in planned.meetings(plan):
        begin = left
        for meeting in step:
            longest = max(meeting) / planned.bound
            for rank, cost in enumerate(meeting):
                work = cost / planned.bound
                axis.barh(rank, work, left=left, height=0.72, color=_WORK[shade % 2])
                axis.barh(
                    rank,
                    longest - work,
                    left=left + work,
                    height=0.72,
                    color=_WAIT,
                    edgecolor=_EDGE,
                    hatch="////",
                    lw=0,
                )
            left += longest
            shade += 1
        axis.plot(
            [begin, left, left, begin, begin],
            [-0.48, -0.48, planned.dp_size - 0.52, planned.dp_size - 0.52, -0.48],
            color="black",
            lw=0.9,
            clip_on=False,
        )
    axis.axvline(1.0, color="#b3261e", lw=1.2, ls="--")
    axis.text(1.0, 1.02, f"{over:.3f} × bound", transform=axis.transAxes, ha="right", va="bottom", fontsize=9)
    axis.set_yticks(range(planned.dp_size), [f"rank {rank}" for rank in range(planned.dp_size)], fontsize=8)
    axis.set_ylim(planned.dp_size - 0.4, -0.6)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
