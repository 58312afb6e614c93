"""What a run leaves behind: a line a step on the screen and in ``metrics.jsonl``, and a picture at the end."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# matplotlib is typed in part only.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from equipoise.errors import InvalidConfig, must
from examples.minimal.settings import FREE_TO_CHANGE, Settings

FILE = "metrics.jsonl"
_PHASES = ("sft", "rl")
_SHOWN = ("reward", "exact", "sft/loss", "actor/loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "tokens")
_SMOOTH = 10


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run; one that a kill has cut short is left out."""
    path = folder / FILE
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def claim(folder: Path, settings: Settings) -> None:
    """Make the folder of a run, or check that the run in it was made with these settings.

    Raises:
        InvalidConfig: it was not, and a setting differs that moves numbers.
    """
    path = folder / "settings.json"
    mine = {name: value for name, value in asdict(settings).items() if name not in FREE_TO_CHANGE}
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps(mine, indent=2) + "\n")
    for name, was in json.loads(path.read_text()).items():
        if mine[name] != was:
            rule = f"be {was!r}, as when the run in {folder} was begun"
            raise InvalidConfig(must(name, rule, mine[name], "set it back, or begin anew with another out="))


class Record:
    """Figures of each step.

    Args:
        folder: of the run.
        writes: whether this rank prints and writes.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.folder = folder
        self.writes = writes

    def back_to(self, phase: str, step: int) -> None:
        """Forget what an earlier run wrote after ``step`` of ``phase`` ("sft" or "rl"): it will be done again."""
        if not self.writes:
            return
        last = (_PHASES.index(phase), step)
        kept = [line for line in read(self.folder) if (_PHASES.index(line["phase"]), line["step"]) <= last]
        _replace(self.folder / FILE, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, phase: str, step: int, of: int, figures: Mapping[str, float], *, seconds: float) -> None:
        """Write one step down."""
        if not self.writes:
            return
        with (self.folder / FILE).open("a") as file:
            file.write(json.dumps({"phase": phase, "step": step, **figures, "seconds": seconds}) + "\n")
        shown = [f"{name} {figures[name]:9.4g}" for name in _SHOWN if name in figures]
        print(f"{phase:3} {step:4}/{of}  {'  '.join(shown)}  {seconds:5.2f} s", flush=True)

    def draw(self, title: str) -> Path:
        """Reward and loss over the RL steps as ``curve.png``."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        lines = [line for line in read(self.folder) if line["phase"] == "rl"]
        steps = [line["step"] for line in lines]
        figure = Figure(figsize=(10, 3.6), layout="constrained", dpi=120)
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        for name, colour, label in (("reward", "#1f5f8b", "reward"), ("exact", "#c26a2d", "share of right answers")):
            values = [line[name] for line in lines]
            left.plot(steps, values, color=colour, alpha=0.3, lw=0.8)
            left.plot(steps, _smooth(values), color=colour, lw=2, label=f"{label}, mean of {_SMOOTH} steps")
        left.set(xlabel="RL step", ylim=(0, 1.02), title="reward")
        left.legend(frameon=False, loc="lower right")
        right.plot(steps, [line["actor/loss"] for line in lines], color="#1f5f8b", lw=1)
        right.set(xlabel="RL step", title="policy loss")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title)
        path = self.folder / "curve.png"
        figure.savefig(path)
        return path


def _replace(path: Path, text: str) -> None:
    """Write a file such that a kill leaves the old one or the new one."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)


def _smooth(values: list[float]) -> list[float]:
    windows = [values[max(0, end - _SMOOTH) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
