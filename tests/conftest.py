"""Long files first, so that the processes of a parallel run end at about the same time."""

from __future__ import annotations

import pytest

LONGEST_FIRST = (
    "test_verl_end_to_end.py",
    "test_examples.py",
    "test_minimal.py",
    "test_verl_router_setup.py",
    "test_verl_on_cpu.py",
    "test_engine_equality.py",
    "test_rollout_faults.py",
    "test_cpu_kernels.py",
    "test_engine_contract.py",
    "test_engine_bench.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files; the tests of a file keep their order."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
