"""One JSON line per step: lengths and plan, for tools that show or replay plans."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.errors import InvalidConfig, must
from equipoise.planning.step import StepPlan
from equipoise.planning.workload import CostModel, FittedCost, TransformerCost


class Recorder:
    """Appends to ``path``; does nothing if it is None.

    Raises:
        InvalidConfig: the file cannot be written.
    """

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path).expanduser().absolute()
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.open("a").close()
            except OSError as error:
                raise InvalidConfig(
                    must("equipoise.record", "be a file that the driver can write", path, str(error))
                ) from error

    def write(
        self,
        *,
        step: int,
        stage: str,
        plan: StepPlan,
        lengths: npt.NDArray[np.int64],
        is_padding: npt.NDArray[np.bool_],
        cost: CostModel,
        seconds: float,
    ) -> None:
        """Append one step."""
        if self.path is None:
            return
        spec = plan.spec
        line: dict[str, Any] = {
            "step": step,
            "role": stage,
            "lengths": lengths.tolist(),
            "is_padding": is_padding.tolist(),
            "dp_size": spec.dp_size,
            "num_mini_batches": spec.num_mini_batches,
            "max_token_len": spec.cap,
            "micro_batch_size": spec.micro_batch_size_per_gpu,
            "micro_batches": [
                [[rows.tolist() for rows in mini_batch] for mini_batch in plan.micro_batches(rank)]
                for rank in range(spec.dp_size)
            ],
            "cost": _cost_as_plain(cost),
            "lockstep_cost": plan.stats.lockstep_cost,
            "bound": plan.stats.bound,
            "plan_seconds": seconds,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _cost_as_plain(cost: CostModel) -> dict[str, Any]:
    if isinstance(cost, TransformerCost):
        return {"model": "transformer", **asdict(cost)}
    if isinstance(cost, FittedCost):
        return {"model": "fitted", **asdict(cost), "windows": []}
    return {"model": "token", "linear": 1.0, "quadratic": 0.0, "windows": []}
