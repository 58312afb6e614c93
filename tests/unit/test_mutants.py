"""The mutation command: changes are valid and single, tests are found by what they import."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutants.changes import changes
from benchmarks.mutants.selection import files_concerning, module_name

ROOT = Path(__file__).parents[2]
SOURCE = '''
"""Docs with 3 numbers."""
from a import b
LIMIT: int | None = 3

@decorated(frozen=True)
def f(x: int = 2, *names: str) -> int | None:
    """Say 1."""
    if x < LIMIT and not names:
        raise ValueError(f"{x + 1} is below {LIMIT}")
    x.items[0] = -x
    log.info("as %d", 1)
    x.close()
    return max(x, 4) if b else "ä" + x
'''


def test_each_change_is_one_place_and_compiles() -> None:
    made = [(change.line, change.after) for change in changes(SOURCE)]
    assert made == [
        (4, "4"),
        (7, "3"),
        (9, "x < LIMIT or not names"),
        (9, "x <= LIMIT"),
        (9, "names"),
        (11, "pass"),
        (11, "1"),
        (11, "x"),
        (13, "pass"),
        (14, "'ä' + x if b else max(x, 4)"),
        (14, "min"),
        (14, "5"),
        (14, "'ä' - x"),
    ]
    for change in changes(SOURCE):
        compile(change.source, "changed", "exec")
        differing = [
            pair for pair in zip(SOURCE.split("\n"), change.source.split("\n"), strict=True) if len({*pair}) > 1
        ]
        assert len(differing) == 1


@pytest.mark.parametrize(
    ("path", "module", "test"),
    [
        ("plugin/equipoise/planning/step/limits.py", "equipoise.planning.step.limits", "property/test_plan.py"),
        ("plugin/equipoise/training/loss/kl.py", "equipoise.training.loss.kl", "unit/test_aggregation.py"),
        ("trainer_hooks/on_verl/driver/refit.py", "equipoise.trainer_hooks.on_verl.driver.refit", "unit/test_refit.py"),
    ],
)
def test_tests_are_found_by_the_rooms_that_they_use(path: str, module: str, test: str) -> None:
    assert module_name(ROOT, ROOT / path) == module
    assert ROOT / "tests" / test in files_concerning(ROOT, ROOT / path)
