"""The length sets that plans are measured on: three seeded draws and two production traces."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
TRACES_VARIABLE = "EQUIPOISE_TRACES"
TRACES = Path(__file__).parents[2] / "shared" / "traces"


class TraceMissing(FileNotFoundError):
    """A trace file is not where it was looked for; says where, and how to point elsewhere."""


def draw(name: str, rows: int, seed: int) -> Lengths:
    """Tokens of ``rows`` rows (prompt and response together) of the set ``name``, shape (rows,).

    Sets: "lognormal" (6.5, 1.0), at most 8192; "bimodal", 70 % from 50 to 200 and 30 % from 800 to 2048; "thinking",
    200 more than log-normal (8.3, 1.0), at most 32768; "code" and "conversation", drawn with replacement from the Azure
    LLM inference traces of 2023 (CC-BY 4.0).

    Args:
        name: one of :data:`SETS`.
        rows: how many rows.
        seed: of the draw; the same seed gives the same rows on every machine.

    Raises:
        TraceMissing: the file of a trace is not there.
        ValueError: no such set.

    """
    if name not in SETS:
        raise ValueError(f"name must be one of {list(SETS)}, got {name!r}; choose a length set")
    lengths = SETS[name](np.random.default_rng([seed, list(SETS).index(name)]), rows)
    return np.maximum(lengths.astype(np.int64), 1)


def _lognormal(rng: np.random.Generator, rows: int) -> npt.NDArray[Any]:
    return np.minimum(rng.lognormal(6.5, 1.0, rows), 8192)


def _bimodal(rng: np.random.Generator, rows: int) -> npt.NDArray[Any]:
    short = rng.random(rows) < 0.7
    return np.where(short, rng.integers(50, 201, rows), rng.integers(800, 2049, rows))


def _thinking(rng: np.random.Generator, rows: int) -> npt.NDArray[Any]:
    return np.minimum(rng.lognormal(8.3, 1.0, rows) + 200, 32768)


def _trace(file: str) -> Callable[[np.random.Generator, int], npt.NDArray[Any]]:
    def sample(rng: np.random.Generator, rows: int) -> npt.NDArray[Any]:
        return rng.choice(_read(traces() / file), rows)

    return sample


SETS: dict[str, Callable[[np.random.Generator, int], npt.NDArray[Any]]] = {
    "lognormal": _lognormal,
    "bimodal": _bimodal,
    "thinking": _thinking,
    "code": _trace("azure_llm_2023_code.csv"),
    "conversation": _trace("azure_llm_2023_conv.csv"),
}


def traces() -> Path:
    """Folder of the trace files: what ``EQUIPOISE_TRACES`` names, else ``../shared/traces`` beside the checkout."""
    return Path(os.environ.get(TRACES_VARIABLE, TRACES))


@cache
def _read(path: Path) -> Lengths:
    if not path.is_file():
        raise TraceMissing(
            f"trace {path.name} must be in {path.parent}, where it is not; put it there or set {TRACES_VARIABLE}"
        )
    with path.open(newline="") as file:
        return np.array([int(row["prompt_len"]) + int(row["response_len"]) for row in csv.DictReader(file)])
