"""The driver's view of a step's rows: keys and tags, no tokens."""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise._arrays import BoolArray, IntArray
from equipoise.planning.step import StepPlan
from equipoise.planning.workload import CostModel


class StepRows:
    """The rows of a step: keys, lengths and padding flags in one order, their cost, and their plans."""

    def __init__(self, batch: Any, cost: CostModel) -> None:
        self.cost = cost
        self.keys: list[str] = list(batch.keys)
        self.lengths: IntArray = np.array([int(tag["seq_len"]) for tag in batch.tags], dtype=np.int64)
        self.is_padding: BoolArray = np.array([bool(tag.get("is_padding", False)) for tag in batch.tags])
        self.plans: dict[Any, StepPlan] = {}
        self.wires: dict[tuple[StepPlan, bool], bytes] = {}
        self._at = {key: i for i, key in enumerate(self.keys)}

    def same_rows(self, batch: Any) -> bool:
        """Whether ``batch`` has these rows, in any order."""
        return len(batch) == len(self.keys) and all(key in self._at for key in batch.keys)

    def places(self, batch: Any) -> IntArray:
        """Position of each row of ``batch`` in this object."""
        return np.array([self._at[key] for key in batch.keys], dtype=np.int64)


def neutral_order(batch: Any) -> list[int]:
    """Prompts in the order of their random ids, rollouts of one prompt together, padding last.

    verl's replay buffer lists rows in the order they finished, short ones first. Cut in that order, the first optimizer
    steps would get the short rows and the last ones the long.
    """

    def place(i: int) -> tuple[bool, str, list[tuple[int, str]]]:
        uid, *rest = str(batch.keys[i]).split("_")
        numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in rest]
        return bool(batch.tags[i].get("is_padding", False)), uid, numbers

    return sorted(range(len(batch)), key=place)
