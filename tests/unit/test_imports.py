"""What ``import equipoise`` costs and brings in, and the registry behind the names."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import equipoise
from equipoise.errors import DuplicateName, EquipoiseError, InfeasiblePlan, InvalidInput, UnknownName
from equipoise.registry import Registry

HEAVY = ("torch", "tensordict", "verl", "ray", "transformers", "hydra", "omegaconf", "pandas", "scipy")


def in_a_fresh_process(code: str) -> Any:
    """What ``code`` leaves in ``result``."""
    script = f"import json, sys, time\n{code}\nprint(json.dumps(result))"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return json.loads(run.stdout)


def test_importing_takes_less_than_a_second_and_a_half() -> None:
    code = "start = time.process_time()\nimport equipoise\nresult = time.process_time() - start"
    assert min(in_a_fresh_process(code) for _ in range(2)) < 1.5


@pytest.mark.parametrize(
    "code",
    [
        "import equipoise",
        "import equipoise as eq; eq.plan_step([3, 2, 1, 4], eq.StepSpec(dp_size=2))",
        "import equipoise as eq; eq.partition([3, 2, 1], 2, algorithm='refined')",
        "import equipoise as eq; eq.plan_step([3, 2], eq.StepSpec(dp_size=1)).metrics('b/')",
    ],
)
def test_planning_imports_no_framework(code: str) -> None:
    assert in_a_fresh_process(f"{code}\nresult = [name for name in {HEAVY!r} if name in sys.modules]") == []


@pytest.mark.parametrize(
    "first", ["equipoise.planning.partition", "equipoise.planning.partition.board", "equipoise.planning.step"]
)
def test_partition_is_the_function_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}\nimport equipoise as eq\nresult = [part.tolist() for part in eq.partition([2, 1], 2)]"
    assert in_a_fresh_process(code) == [[0], [1]]


def test_every_public_name_is_there_and_listed() -> None:
    for name in equipoise.__all__:
        assert getattr(equipoise, name) is not None
    assert {"plan_step", "partition", "StepSpec", "DecodeEngine"} <= set(equipoise.__all__) == set(dir(equipoise))


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="plan_stepp"):
        _ = equipoise.plan_stepp  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]


def test_a_registry_refuses_duplicates() -> None:
    rules = Registry[int]("rule")
    assert rules.register("one", 1) == 1
    assert rules.decorator("two")(2) == 2
    with pytest.raises(DuplicateName, match="rule name must be new, got 'one'; choose another name"):
        rules.register("one", 3)
    assert (rules["one"], list(rules), len(rules), "two" in rules) == (1, ["one", "two"], 2, True)


def test_a_registry_lists_what_it_knows() -> None:
    rules = Registry[int]("rule")
    rules.register("first", 1)
    rules.register("second", 2)
    with pytest.raises(
        UnknownName, match=r"rule must be one of \[first, second\], got 'frist'; did you mean 'first'\?"
    ):
        _ = rules["frist"]
    with pytest.raises(LookupError, match=r"got 'x'; known: first, second"):
        _ = rules["x"]


def test_errors_are_what_a_caller_would_expect() -> None:
    assert issubclass(InfeasiblePlan, InvalidInput)
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(UnknownName, LookupError)
    for error in (InfeasiblePlan, InvalidInput, UnknownName, DuplicateName):
        assert issubclass(error, EquipoiseError)
