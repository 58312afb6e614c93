"""The command line of the main job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from equipoise.errors import EquipoiseError
from examples.main_job.job import Options, run
from examples.main_job.presets import NUM_RANKS, PRESETS

_EPILOG = """\
Everything after `--` goes to verl as Hydra overrides and wins over what the job sets; write paths in full.

  python -m examples.main_job --model tiny
  python -m examples.main_job --steps 3 -- equipoise.composition=stratified
  make run MODEL=tiny ARGS='--steps 2 -- equipoise.algorithm=kk'

A run writes outputs/<time>/ and points outputs/latest there: table.md, loads.png, summary.json, verl.log,
plans.jsonl (each step's lengths and plan) and metrics.jsonl (verl's own metrics).
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    presets = "; ".join(f"{preset.name}: {preset.title}, {preset.steps} steps" for preset in PRESETS.values())
    result = argparse.ArgumentParser(
        prog="python -m examples.main_job",
        description=f"GRPO with an unmodified verl 0.9.1 on {NUM_RANKS} data-parallel CPU ranks, planned by Equipoise. "
        "Shows progress live and ends with a table and a picture of who works and who waits, before and after.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--model", choices=list(PRESETS), default="smollm2", help=f"{presets} (default: %(default)s)")
    result.add_argument("--steps", type=_positive, help="training steps (default: the model's)")
    result.add_argument("--seed", type=_natural, default=1, help="of prompts and their order (default: %(default)s)")
    result.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), help="where runs are written (default: %(default)s)"
    )
    result.add_argument("--plain", action="store_true", help="a line a step instead of the live display")
    result.add_argument("overrides", nargs="*", metavar="-- OVERRIDE", help="Hydra overrides for verl")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    options = parser().parse_args(arguments)
    preset = PRESETS[options.model]
    console = Console()
    try:
        return run(
            Options(
                preset=preset,
                steps=options.steps or preset.steps,
                seed=options.seed,
                output_dir=options.output_dir,
                extra=tuple(options.overrides),
                live=not options.plain,
            ),
            console,
        )
    except EquipoiseError as error:
        Console(stderr=True).print(f"[red bold]error:[/] {error}", highlight=False, soft_wrap=True)
        return 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
