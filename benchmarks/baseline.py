"""The committed baseline: what Equipoise reached before, on which machine, and what got worse since."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.planners import OURS, is_ours
from benchmarks.run import Run, middle_ms

BASELINE = Path(__file__).parent / "baseline.json"
QUALITY = 0.002
TIME = 0.25
PACE = "verl"

Cells = dict[str, dict[str, dict[str, Any]]]
"""cell -> planner -> {"lockstep": {seed: value}, "rank": {seed: value}, "time": ratio to verl}"""


def machine() -> dict[str, str]:
    """Where and with what a run was made."""
    return {
        "date": date.today().isoformat(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "torch", "verl", "TransferQueue")},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cells(run: Run) -> Cells:
    """Figures of Equipoise's planners: quality by seed, and time as a ratio to verl's in the same cell of the run."""
    found: Cells = {}
    for cell in run.cells():
        pace = middle_ms(run.of(cell, PACE))
        for planner in filter(is_ours, run.planners()):
            records = [record for record in run.of(cell, planner) if record.figures]
            times = middle_ms(records)
            if not times:
                continue
            entry: dict[str, Any] = {
                figure: {str(record.seed): round(getattr(record.figures, figure), 6) for record in records}
                for figure in ("lockstep", "rank")
            }
            if pace and pace[0] > 0:
                entry["time"] = round(times[0] / pace[0], 4)
            found.setdefault(cell, {})[planner] = entry
    return found


def write(run: Run, path: Path = BASELINE) -> None:
    """Make this run the baseline."""
    lines = ",\n".join(
        f"  {json.dumps(cell)}: {json.dumps(entry, separators=(',', ':'))}" for cell, entry in cells(run).items()
    )
    path.write_text(f'{{"machine": {json.dumps(machine())},\n "cells": {{\n{lines}\n}}}}\n')


def read(path: Path = BASELINE) -> dict[str, Any] | None:
    """The baseline; None where there is none."""
    return json.loads(path.read_text()) if path.is_file() else None


def worse(run: Run, baseline: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What got worse, in quality and in time, over the cells, planners and seeds that both have.

    Quality: the mean over seeds of the figure that the planner is for is more than 0.2 % higher. Time: its ratio to
    verl's in the same run is more than 25 % higher in the median over cells.
    """
    now, then = cells(run), baseline["cells"]
    quality: list[str] = []
    ratios: dict[str, list[float]] = {}
    both = [(cell, planner) for cell, found in now.items() for planner in found if planner in then.get(cell, {})]
    for cell, planner in both:
        new, old = now[cell][planner], then[cell][planner]
        figure = "rank" if planner == f"{OURS}, rank" else "lockstep"
        seeds = new[figure].keys() & old[figure].keys()
        if seeds:
            after, before = (sum(entry[figure][seed] for seed in seeds) / len(seeds) for entry in (new, old))
            if after > before * (1 + QUALITY):
                quality.append(f"{cell}: {planner} {figure} {before:.4f} -> {after:.4f}")
        if "time" in new and "time" in old:
            ratios.setdefault(planner, []).append(new["time"] / old["time"])
    slower = [
        f"{planner}: {median(found):.2f} times as long as before, against verl in the same run"
        for planner, found in ratios.items()
        if median(found) > 1 + TIME
    ]
    return quality, slower
