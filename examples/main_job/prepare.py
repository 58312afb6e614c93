"""What verl reads: a model folder, prompts and a reward; made by short commands that a Ctrl-C can end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.main_job import reward
from examples.main_job.presets import Preset
from examples.main_job.smollm2 import gguf_folder

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "main_job"
_FORMAT = 1  # of the cached files; raise it when what is written changes


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Where the parts lie."""

    model: Path
    train: Path
    val: Path
    reward: Path


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """One command that has to run before verl, and what to tell the user meanwhile."""

    text: str
    command: Sequence[str]


def plan_inputs(preset: Preset, folder: Path, *, steps: int, seed: int) -> tuple[Inputs, list[Preparation]]:
    """The parts of a run in ``folder``, and the commands that make those which are not there yet.

    Raises:
        EquipoiseError: the model's package is not installed.
    """
    if preset.name == "tiny":
        made = CACHE / f"tiny-{_FORMAT}"
        inputs = Inputs(
            model=made / "model", train=made / "train.parquet", val=made / "val.parquet", reward=made / "reward.py"
        )
        toy = Preparation(text="making the toy model", command=_module("examples.tiny", made))
        return inputs, [] if inputs.reward.exists() else [toy]
    gguf_folder()
    prompts = folder / "prompts.parquet"
    inputs = Inputs(
        model=CACHE / f"{preset.name}-{_FORMAT}", train=prompts, val=prompts, reward=Path(reward.__file__).absolute()
    )
    size = max(64, steps * preset.train_batch_size)
    commands = [Preparation(text="drawing the prompts", command=_module("examples.main_job.sums", prompts, size, seed))]
    if not inputs.model.exists():
        convert = _module("examples.main_job.smollm2", inputs.model)
        commands.append(Preparation(text="converting the model, once (half a minute)", command=convert))
    return inputs, commands


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", name, *map(str, arguments)]
