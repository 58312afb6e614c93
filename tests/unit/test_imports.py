"""What imports cost and bring in, hooks that wait for one, and the registry behind the names."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import equipoise
from equipoise.errors import DuplicateName, EquipoiseError, InfeasiblePlan, InvalidInput, UnknownName
from equipoise.registry import Registry
from equipoise.trainer_hooks._imports import when_imported

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


def module_file(folder: Path, body: str = "value = 1\n") -> str:
    """A module of a fresh name in ``folder``."""
    name = f"eq_awaited_{folder.name}_{len(list(folder.iterdir()))}".replace("-", "_")
    (folder / f"{name}.py").write_text(body)
    return name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_hook_runs_once_the_module_is_imported_and_not_before(folder: Path) -> None:
    name, seen = module_file(folder), list[ModuleType]()
    when_imported(name, seen.append)
    assert (seen, name in sys.modules) == ([], False)
    module = importlib.import_module(name)
    assert importlib.import_module(name) is module
    assert seen == [module]


def test_a_hook_runs_at_once_where_the_module_is_loaded(folder: Path) -> None:
    module, seen = importlib.import_module(module_file(folder)), list[ModuleType]()
    when_imported(module.__name__, seen.append)
    assert seen == [module]


def test_a_hook_survives_a_look_for_the_module(folder: Path) -> None:
    name, seen = module_file(folder), list[int]()
    when_imported(name, lambda module: seen.append(module.value))
    for _ in range(2):
        assert importlib.util.find_spec(name) is not None
    importlib.import_module(name)
    assert seen == [1]


def test_a_hook_survives_an_import_that_fails(folder: Path) -> None:
    name, seen = module_file(folder, "raise ImportError('not yet')\n"), list[int]()
    when_imported(name, lambda module: seen.append(module.value))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(name)
    (folder / f"{name}.py").write_text("value = 2222\n")
    importlib.import_module(name)
    assert seen == [2222]


def test_a_hook_that_fails_fails_the_import_and_runs_at_the_next(folder: Path) -> None:
    name, seen = module_file(folder), list[ModuleType]()

    def hook(module: ModuleType) -> None:
        seen.append(module)
        if len(seen) == 1:
            raise RuntimeError("hook")

    when_imported(name, hook)
    with pytest.raises(RuntimeError, match="hook"):
        importlib.import_module(name)
    assert name not in sys.modules
    assert seen[1:] == []
    assert seen[-1] is not importlib.import_module(name)
    assert len(seen) == 2


def test_a_hook_runs_again_where_the_module_is_run_again(folder: Path) -> None:
    name, seen = module_file(folder), list[int]()
    when_imported(name, lambda module: seen.append(module.value))
    module = importlib.import_module(name)
    assert importlib.reload(module) is module
    assert seen == [1, 1]
    del sys.modules[name]
    importlib.import_module(name)
    assert seen == [1, 1, 1]


def test_several_hooks_wait_for_one_module(folder: Path) -> None:
    name, seen = module_file(folder), list[str]()
    when_imported(name, lambda _: seen.append("first"))
    when_imported(name, lambda _: seen.append("second"))
    importlib.import_module(name)
    assert seen == ["first", "second"]


@pytest.mark.parametrize("package", ["equipoise.trainer_hooks.on_verl", "equipoise.trainer_hooks.verl_on_cpu"])
def test_loading_a_plugin_imports_no_framework(package: str) -> None:
    code = f"import {package}\nresult = [name for name in {HEAVY!r} if name in sys.modules]"
    assert in_a_fresh_process(code) == []


def test_a_registry_refuses_duplicates() -> None:
    rules = Registry[int]("rule")
    assert rules.register("one", 1) == 1
    assert rules.decorator("two")(2) == 2
    with pytest.raises(DuplicateName, match=r"rule name.*'one'"):
        rules.register("one", 3)
    assert (rules["one"], list(rules), len(rules), "two" in rules) == (1, ["one", "two"], 2, True)


def test_a_registry_lists_what_it_knows() -> None:
    rules = Registry[int]("rule")
    rules.register("first", 1)
    rules.register("second", 2)
    with pytest.raises(UnknownName, match=r"rule.*\[first, second\].*'frist'.*'first'"):
        _ = rules["frist"]
    with pytest.raises(LookupError, match=r"'x'.*first, second"):
        _ = rules["x"]


def test_errors_are_what_a_caller_would_expect() -> None:
    assert issubclass(InfeasiblePlan, InvalidInput)
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(UnknownName, LookupError)
    for error in (InfeasiblePlan, InvalidInput, UnknownName, DuplicateName):
        assert issubclass(error, EquipoiseError)
