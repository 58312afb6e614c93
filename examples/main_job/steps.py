"""What is known of each step: what Equipoise planned, what verl measured, and what verl would have run on its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.verl_rule import MicroBatches, lockstep_cost


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One line of the file that ``equipoise.record`` names."""

    step: int
    lengths: tuple[int, ...]
    is_padding: tuple[bool, ...]
    dp_size: int
    num_mini_batches: int
    cap: int | None
    micro_batches: MicroBatches
    linear: float
    quadratic: float
    lockstep: float
    bound: float

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Planned:
        """From the line's JSON object."""
        by_token = line["cost"].get("model") == "token"
        return cls(
            step=line["step"],
            lengths=tuple(line["lengths"]),
            is_padding=tuple(line["is_padding"]),
            dp_size=line["dp_size"],
            num_mini_batches=line["num_mini_batches"],
            cap=line["max_token_len"],
            micro_batches=line["micro_batches"],
            linear=1.0 if by_token else line["cost"]["linear"],
            quadratic=0.0 if by_token else line["cost"]["quadratic"],
            lockstep=line["lockstep_cost"],
            bound=line["bound"],
        )

    @property
    def real(self) -> list[int]:
        """Lengths of the rows that are no padding."""
        return [length for length, pad in zip(self.lengths, self.is_padding, strict=True) if not pad]

    @property
    def max_tokens(self) -> int:
        """Tokens of the fullest micro-batch."""
        micros = [micro for rank in self.micro_batches for step in rank for micro in step]
        return max(sum(self.lengths[row] for row in micro) for micro in micros)

    def meetings(self, micro_batches: MicroBatches) -> list[list[list[float]]]:
        """Cost of each rank at each meeting of all ranks: [mini-batch][micro-batch][rank]."""
        cost = [self.linear * length + self.quadratic * float(length) ** 2 for length in self.lengths]
        return [
            [[sum(cost[row] for row in rank[step][index]) for rank in micro_batches] for index in range(len(micros))]
            for step, micros in enumerate(micro_batches[0])
        ]


@dataclass(kw_only=True)
class Step:
    """A step; what has not come in yet is None."""

    number: int
    planned: Planned | None = None
    verl: MicroBatches | None = None
    """What verl 0.9.1 would have run on the same lengths."""
    metrics: Mapping[str, float] | None = None
    """What verl's tracker got at the end of the step."""
    predicted_s: float | None = None
    """Time of the update, predicted from the plan before it ran."""

    @property
    def over_bound(self) -> float | None:
        """Lockstep cost of the plan over its bound."""
        return None if self.planned is None else self.planned.lockstep / self.planned.bound

    @property
    def over_bound_verl(self) -> float | None:
        """Lockstep cost of verl's own micro-batches over the same bound."""
        if self.planned is None or self.verl is None:
            return None
        planned = self.planned
        cost = lockstep_cost(self.verl, planned.lengths, linear=planned.linear, quadratic=planned.quadratic)
        return cost / planned.bound

    @property
    def reward(self) -> float | None:
        """Mean over the responses."""
        return self.metric("critic/score/mean")

    @property
    def update_s(self) -> float | None:
        """Time that the actor's update took."""
        return self.metric("timing_s/update_actor")

    def metric(self, name: str) -> float | None:
        """One of verl's metrics."""
        value = None if self.metrics is None else self.metrics.get(name)
        return None if value is None else float(value)


class Ledger:
    """Joins the two files that a run writes, step by step.

    Args:
        record: written by Equipoise when it has planned a step.
        metrics: written by verl when a step is over.
    """

    def __init__(self, *, record: Path, metrics: Path) -> None:
        self._record = _Tail(record)
        self._metrics = _Tail(metrics)
        self._steps: dict[int, Step] = {}

    @property
    def steps(self) -> list[Step]:
        """The steps so far, in order."""
        return [self._steps[number] for number in sorted(self._steps)]

    @property
    def done(self) -> list[Step]:
        """Those that are over."""
        return [step for step in self.steps if step.update_s is not None]

    def look(self) -> list[Step]:
        """Read what is new; returns the steps whose plan has just come in."""
        planned: list[Step] = []
        for line in self._metrics:
            step = self._step(line["step"])
            step.metrics = {**(step.metrics or {}), **line["data"]}
        for line in self._record:
            if line["role"] == "actor":
                step = self._step(line["step"])
                step.planned = Planned.read(line)
                step.predicted_s = self._predict(step.planned)
                planned.append(step)
        return planned

    def _step(self, number: int) -> Step:
        return self._steps.setdefault(number, Step(number=number))

    def _predict(self, planned: Planned) -> float | None:
        """Lockstep cost times the seconds per unit of cost of the steps before; None without any."""
        before = [(s.update_s, s.planned.lockstep) for s in self.done if s.planned and s.number < planned.step]
        seconds = sum(time_s for time_s, _ in before if time_s is not None)
        return planned.lockstep * seconds / sum(cost for _, cost in before) if before else None


class _Tail:
    """Complete lines of JSON that have been added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)
