"""Rows of tensors: reordered, split into micro-batches, and joined."""

# tensordict annotates its columns loosely.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import equipoise as eq
from equipoise.training.batch import consecutive, cut_rows, join_outputs
from tests.unit.batch_rows import rollout_batch, rows, verl_like


def test_every_column_moves_together() -> None:
    """Rows a, b, c reordered to c, a, b."""
    batch = rollout_batch([3, 5, 4])
    moved = eq.reorder(batch, [2, 0, 1])
    for name in ("input_ids", "experts", "reward", "uid", "tools"):
        before = rows(batch[name]) if name not in ("uid", "tools") else batch.get(name).tolist()
        after = rows(moved[name]) if name not in ("uid", "tools") else moved.get(name).tolist()
        assert after == [before[2], before[0], before[1]], name
    assert moved["temperature"] == 0.7


def test_a_column_of_the_wrong_length_is_named() -> None:
    batch = rollout_batch([3, 5, 4])
    longer = rollout_batch([3, 5, 4, 6])
    batch._tensordict["reward"] = longer["reward"]  # pyright: ignore[reportPrivateUsage] - as a careless caller would
    with pytest.raises(eq.InvalidInput, match=r"'reward'.*\b3\b.*got 4"):
        eq.reorder(batch, [0, 1, 2])


def test_per_token_side_data_moves_with_its_row() -> None:
    moved = eq.reorder(rollout_batch([3, 5, 4]), [1, 2, 0])
    for ids, experts in zip(moved["input_ids"].unbind(), moved["experts"].unbind(), strict=True):
        assert ids.shape[0] == experts.shape[0]
        assert (experts == ids[0] // 100).all()


def test_jagged_columns_with_a_leading_dimension_move() -> None:
    """mRoPE position ids: four rows of positions for each token."""
    values = [torch.arange(4 * n).reshape(4, n) for n in (3, 5)]
    lengths = torch.tensor([0, 3, 8])
    column = torch.nested.nested_tensor_from_jagged(torch.cat(values, dim=1), offsets=lengths, jagged_dim=2)
    batch = TensorDict({"position_ids": column, "x": torch.arange(2)}, batch_size=[2])
    moved: Any = eq.reorder(batch, [1, 0])["position_ids"]
    assert moved.offsets().tolist() == [0, 5, 8]
    assert torch.equal(moved.values(), torch.cat(values[::-1], dim=1))


@pytest.mark.parametrize("order", [[0, 3], [-1, 0], [0.5, 1.0], [[0, 1]]])
def test_reorder_rejects_ids_that_are_no_rows(order: Any) -> None:
    with pytest.raises(eq.InvalidInput, match="order"):
        eq.reorder(rollout_batch([3, 5, 4]), order)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_outputs_of_all_micro_batches_come_back_in_order(dp: int) -> None:
    lengths = np.random.default_rng(dp).integers(3, 60, 32)
    plan = eq.plan_step(lengths, eq.StepSpec(dp_size=dp, num_mini_batches=2, max_token_len_per_gpu=120))
    batch = rollout_batch(lengths.tolist())
    dispatched = eq.reorder(batch, plan.order)
    seen: list[int] = []
    for rank in range(dp):
        outputs = []
        for mini_batch in plan.micro_batches(rank):
            for ids in mini_batch:
                piece = eq.reorder(batch, ids)
                outputs.append(TensorDict({"log_probs": piece["input_ids"], "row": piece["reward"]}, [len(ids)]))
        restored = eq.restore(outputs, plan, rank)
        order = restored["row"].long().tolist()
        assert order == sorted(order)
        assert [row[0] for row in rows(restored["log_probs"])] == [100 * i for i in order]
        seen += order
    assert sorted(seen) == list(range(32))
    assert rows(dispatched["reward"]) == plan.order.tolist()


def test_restore_rejects_a_missing_micro_batch() -> None:
    plan = eq.plan_step([4, 4, 4, 4], eq.StepSpec(dp_size=2, max_token_len_per_gpu=4))
    outputs = [TensorDict({"x": torch.zeros(1)}, [1])]
    with pytest.raises(eq.InvalidInput, match=r"outputs.*\b2\b.*got 1"):
        eq.restore(outputs, plan, 0)
    with pytest.raises(eq.InvalidInput, match=r"outputs\[1\].*\b1\b.*got 2"):
        eq.restore([outputs[0], TensorDict({"x": torch.zeros(2)}, [2])], plan, 0)


def test_rows_are_cut_into_planned_micro_batches_with_all_their_columns() -> None:
    lengths = [3, 5, 2, 4]
    data = verl_like(lengths)
    pieces = cut_rows(data, consecutive([1, 3]))
    assert [len(piece) for piece in pieces] == [1, 3]
    for piece, ids in zip(pieces, ([0], [1, 2, 3]), strict=True):
        assert rows(piece["input_ids"]) == [rows(data["input_ids"])[i] for i in ids]
        positions: Any = piece["position_ids"]
        assert positions.offsets().diff().tolist() == [lengths[i] for i in ids]
        want = torch.cat([torch.arange(4 * lengths[i]).reshape(4, -1) for i in ids], dim=1)
        assert torch.equal(positions.values(), want)
        assert cast(Any, piece["pixel_values"]).offsets().diff().tolist() == [4 * (i % 2) for i in ids]
        assert piece["advantages"].tolist() == ids
        assert piece.get("multi_modal_inputs").tolist() == [data.get("multi_modal_inputs").tolist()[i] for i in ids]
        assert piece["use_dynamic_bsz"] is True
        assert piece["temperature"] == 0.5


def test_all_rows_in_their_order_are_not_copied() -> None:
    data = verl_like([3, 5])
    assert cut_rows(data, [[0, 1]])[0] is data
    assert cut_rows(data, [[1, 0]])[0] is not data


@pytest.mark.parametrize("parts", [[[2, 0], [3], [1]], [[0], [1, 2, 3]]])
def test_outputs_are_joined_as_the_rows_were(parts: list[list[int]]) -> None:
    data = verl_like([3, 5, 2, 4])
    back = join_outputs(cut_rows(data, parts), parts)
    assert rows(back["input_ids"]) == rows(data["input_ids"])
    assert torch.equal(cast(Any, back["position_ids"]).values(), cast(Any, data["position_ids"]).values())
    assert back["advantages"].tolist() == data["advantages"].tolist()
    assert back.get("multi_modal_inputs").tolist() == data.get("multi_modal_inputs").tolist()
    assert back.get("temperature").tolist() == [0.5] * 4


def test_views_of_jagged_tensors_keep_their_rows() -> None:
    """A jagged tensor may hold gaps between its rows, as one narrowed from a padded tensor does."""
    view = torch.nested.narrow(
        torch.arange(15).reshape(3, 5), 1, torch.tensor([1, 0, 2]), torch.tensor([2, 4, 3]), layout=torch.jagged
    )
    moved = eq.reorder(TensorDict({"input_ids": view}, batch_size=[3]), [2, 0])
    assert rows(moved["input_ids"]) == [[12, 13, 14], [1, 2]]


def test_nested_tensors_that_are_not_jagged_are_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls this layout a prototype
        strided = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)])
    with pytest.raises(eq.InvalidInput, match=r"'input_ids'.*jagged.*strided"):
        eq.reorder(TensorDict({"input_ids": strided}, batch_size=[2]), [1, 0])
