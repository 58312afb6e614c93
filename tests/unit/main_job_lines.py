"""What equipoise and verl write about a step of the main job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LENGTHS = [10, 20, 30, 40, 50, 60, 70, 80]


def record_line(number: int) -> dict[str, Any]:
    return {
        "step": number,
        "role": "actor",
        "lengths": LENGTHS,
        "is_padding": [False] * 7 + [True],
        "dp_size": 2,
        "num_mini_batches": 2,
        "max_token_len": 140,
        "micro_batch_size": None,
        "micro_batches": [[[[0, 3]], [[4, 7]]], [[[1, 2]], [[5, 6]]]],
        "cost": {"linear": 1.0, "quadratic": 0.0},
        "lockstep_cost": 180.0,
        "bound": 180.0,
        "plan_seconds": 0.01,
    }


def metrics_line(number: int, update_s: float) -> dict[str, Any]:
    return {
        "step": number,
        "data": {
            "critic/score/mean": 0.25,
            "timing_s/update_actor": update_s,
            "timing_s/step": 3 * update_s,
            "response_length/min": 3.0,
            "response_length/mean": 9.5,
            "response_length/max": 30.0,
        },
    }


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
