"""Two plots of a run: quality by length set, and planning time by size."""

# pyright: reportUnknownMemberType=false
# matplotlib is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("agg")

import matplotlib.pyplot as plt  # after the backend is chosen

from benchmarks.cases import Size
from benchmarks.planners import OURS, is_ours
from benchmarks.run import Run, mean
from benchmarks.speed import Timing

OURS_COLOUR = "#0b6e4f"
PEER_COLOUR = "#8a8f98"
STYLES = ("-", "--", ":", "-.", (0, (1, 2)))


def quality(run: Run, path: Path) -> None:
    """Lockstep cost over the bound: a panel for each length set, a line for each planner."""
    cells, planners = run.cells(), run.planners()
    sets = list(dict.fromkeys(cell.split("/")[0] for cell in cells))
    figure, panels = plt.subplots(
        1, len(sets), figsize=(3.2 * len(sets) + 2, 0.34 * len(planners) + 1.4), sharey=True, squeeze=False
    )
    for panel, name in zip(panels[0], sets, strict=True):
        for place, planner in enumerate(reversed(planners)):
            of_set = [mean(run.of(cell, planner), "lockstep") for cell in cells if cell.startswith(f"{name}/")]
            waits = [100 * (value - 1) for value in of_set if value is not None]
            if waits:
                colour = OURS_COLOUR if is_ours(planner) else PEER_COLOUR
                panel.plot([min(waits), max(waits)], [place, place], color=colour, lw=2, alpha=0.5)
                panel.plot([median(waits)], [place], "o", color=colour, ms=7 if planner == OURS else 5)
        panel.set_title(name)
        panel.set_xlabel("% above the bound")
        panel.set_xscale("symlog", linthresh=1)
        panel.set_yticks(range(len(planners)), list(reversed(planners)))
        panel.grid(axis="x", alpha=0.3)
    figure.suptitle("Lockstep cost: median (dot) and range over sizes and caps")
    _save(figure, path)


def planning_time(timings: Sequence[Timing], path: Path) -> None:
    """Processor time of one step by rows, with ranks growing alongside."""
    figure, panel = plt.subplots(figsize=(10, 4.8))
    planners = list(dict.fromkeys(timing.planner for timing in timings))
    for ours in (True, False):
        names = [name for name in planners if is_ours(name) == ours]
        for i, name in enumerate(names):
            points = [
                (Size.parse(timing.size).rows, timing.ms)
                for timing in timings
                if timing.planner == name and timing.ms is not None
            ]
            if points:
                rows, ms = zip(*points, strict=True)
                style = STYLES[i % len(STYLES)]
                panel.plot(rows, ms, marker="o", ls=style, color=OURS_COLOUR if ours else PEER_COLOUR, label=name)
    sizes = [Size.parse(size) for size in dict.fromkeys(timing.size for timing in timings)]
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks([size.rows for size in sizes], [f"{size.rows}\n{size.dp_size} ranks" for size in sizes])
    panel.minorticks_off()
    panel.set_xlabel("rows of a step")
    panel.set_ylabel("processor milliseconds")
    panel.set_title("Planning time of one step")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
