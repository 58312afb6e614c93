"""The planners of a run: Equipoise in each of its ways, and all peers, behind one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import numpy as np

from benchmarks.cases import Case
from benchmarks.clock import Clock
from benchmarks.peers import PEERS, Rule
from benchmarks.verl_rule import MicroBatches
from equipoise import StepSpec, plan_step

Planner = Callable[[Case, Clock], MicroBatches]
OURS = "Equipoise"


def planners() -> dict[str, Planner]:
    """All planners by name; those of Equipoise start with :data:`OURS`, its default first.

    One for each value of ``algorithm``, ``objective`` and ``composition`` (where the spec has the field), with the
    other fields at their defaults, and one whose ranks may differ by a row.
    """
    fields = {field.name: field.default for field in dataclasses.fields(StepSpec)}
    ways: dict[str, dict[str, Any]] = {OURS: {}}
    for field in ("algorithm", "objective", "composition"):
        for option in _options(field):
            if option != fields[field]:
                ways[f"{OURS}, {option}"] = {field: option}
    ways[f"{OURS}, uneven rows"] = {"equal_count": False}
    return {name: _ours(way) for name, way in ways.items()} | {name: _peer(rule) for name, rule in PEERS.items()}


def is_ours(name: str) -> bool:
    """Whether a planner is one of Equipoise's."""
    return name.startswith(OURS)


def _options(field: str) -> tuple[str, ...]:
    return get_args(get_type_hints(StepSpec).get(field))


def _ours(way: dict[str, Any]) -> Planner:
    def run(case: Case, clock: Clock) -> MicroBatches:
        lengths = np.asarray(case.lengths)
        with clock.driver():
            spec = StepSpec(
                dp_size=case.size.dp_size,
                num_mini_batches=case.size.num_mini_batches,
                max_token_len_per_gpu=case.max_token_len,
                **way,
            )
            plan = plan_step(lengths, spec)
        return [
            [[rows.tolist() for rows in micros] for micros in plan.micro_batches(rank)]
            for rank in range(case.size.dp_size)
        ]

    return run


def _peer(rule: Rule) -> Planner:
    def run(case: Case, clock: Clock) -> MicroBatches:
        return rule(
            case.lengths,
            dp_size=case.size.dp_size,
            num_mini_batches=case.size.num_mini_batches,
            max_token_len=case.max_token_len,
            clock=clock,
        )

    return run
