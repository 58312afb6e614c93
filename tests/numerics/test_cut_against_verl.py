"""Rows cut for verl's workers are those that verl's own function selects."""

# verl and tensordict are typed in part only.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack

from equipoise.training.batch import cut_rows
from tests.unit.batch_rows import verl_like


@pytest.mark.parametrize("parts", [[[0], [1, 2, 3]], [[2, 0], [3, 1]]])
def test_micro_batches_are_those_that_verl_selects(parts: list[list[int]]) -> None:
    tu: Any = pytest.importorskip("verl.utils.tensordict_utils")
    data = verl_like([3, 5, 2, 4])
    for ours, rows in zip(cut_rows(data, parts), parts, strict=True):
        theirs = tu.index_select_tensor_dict(data, rows)
        assert (set(ours.keys()), ours.batch_size) == (set(theirs.keys()), theirs.batch_size)
        for name in data.keys():  # noqa: SIM118 - iterating a TensorDict gives its rows
            _assert_same(ours.get(name), theirs.get(name))


def _assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if getattr(ours, "is_nested", False):
        assert torch.equal(ours.values(), theirs.values())
        assert torch.equal(ours.offsets(), theirs.offsets())
        assert getattr(ours, "_ragged_idx", 1) == getattr(theirs, "_ragged_idx", 1)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, NonTensorStack):
        assert ours.tolist() == theirs.tolist()
    else:
        assert (ours.data, ours.batch_size) == (theirs.data, theirs.batch_size)
