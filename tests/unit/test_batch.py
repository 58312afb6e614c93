"""Rows of tensors: padding, reordering, putting outputs back."""

# tensordict annotates its columns loosely.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import equipoise as eq


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def stack(*values: Any) -> Any:
    make: Any = NonTensorStack
    return make(*values)


def rollout_batch(lengths: list[int], *, prompt: int = 2) -> TensorDict:
    """Jagged columns as a rollout gives them, with per-token and per-row side data."""
    n = len(lengths)
    ids = [torch.arange(100 * i, 100 * i + length) for i, length in enumerate(lengths)]
    experts = jagged([torch.full((length, 2), i) for i, length in enumerate(lengths)])
    return TensorDict(
        {
            "input_ids": jagged(ids),
            "position_ids": jagged([torch.arange(length) for length in lengths]),
            "prompts": jagged([row[:prompt] for row in ids]),
            "responses": jagged([row[prompt:] for row in ids]),
            "response_mask": jagged([torch.ones(length - prompt) for length in lengths]),
            "experts": experts,
            "reward": torch.arange(n, dtype=torch.float32),
            "uid": stack(*[f"u{i // 2}" for i in range(n)]),
            "tools": stack(*[["call"] * i for i in range(n)]),
            "temperature": NonTensorData(0.7, batch_size=[n]),
        },
        batch_size=[n],
    )


def rows(column: Any) -> list[Any]:
    return [row.tolist() for row in column.unbind()] if isinstance(column, torch.Tensor) else column.tolist()


def test_g2_every_column_moves_together() -> None:
    """Rows a, b, c reordered to c, a, b."""
    batch = rollout_batch([3, 5, 4])
    moved = eq.reorder(batch, [2, 0, 1])
    for name in ("input_ids", "experts", "reward", "uid", "tools"):
        before = rows(batch[name]) if name not in ("uid", "tools") else batch.get(name).tolist()
        after = rows(moved[name]) if name not in ("uid", "tools") else moved.get(name).tolist()
        assert after == [before[2], before[0], before[1]], name
    assert moved["temperature"] == 0.7


def test_g2_a_column_of_the_wrong_length_is_named() -> None:
    batch = rollout_batch([3, 5, 4])
    longer = rollout_batch([3, 5, 4, 6])
    batch._tensordict["reward"] = longer["reward"]  # pyright: ignore[reportPrivateUsage] - as a careless caller would
    with pytest.raises(eq.InvalidInput, match=r"column 'reward' must have the batch's 3 rows, got 4"):
        eq.reorder(batch, [0, 1, 2])


def test_g4_per_token_side_data_moves_with_its_row() -> None:
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
    with pytest.raises(eq.InvalidInput, match="order must"):
        eq.reorder(rollout_batch([3, 5, 4]), order)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_g1_outputs_of_all_micro_batches_come_back_in_order(dp: int) -> None:
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
    with pytest.raises(eq.InvalidInput, match="outputs must be the 2 micro-batches of rank 0, got 1"):
        eq.restore(outputs, plan, 0)
    with pytest.raises(eq.InvalidInput, match=r"outputs\[1\] must have the 1 rows"):
        eq.restore([outputs[0], TensorDict({"x": torch.zeros(2)}, [2])], plan, 0)


def test_d1_a_padding_row_is_in_no_group() -> None:
    """Group rewards [1, 0] and one padding row: the group's mean stays 0.5."""
    batch = rollout_batch([4, 5])
    batch["reward"] = torch.tensor([1.0, 0.0])
    padded = eq.pad_batch(batch, 1, eos_token_id=7)
    groups: dict[str, list[float]] = {}
    for uid, reward in zip(padded.get("uid").tolist(), padded["reward"].tolist(), strict=True):
        groups.setdefault(uid, []).append(reward)
    assert sum(groups["u0"]) / len(groups["u0"]) == 0.5
    assert len(groups) == 2


def test_padding_rows_have_two_tokens_and_no_mask() -> None:
    padded = eq.pad_batch(rollout_batch([4, 5]), 2, eos_token_id=7)
    assert padded.batch_size == torch.Size([4])
    assert padded["is_padding"].tolist() == [False, False, True, True]
    assert rows(padded["input_ids"])[2:] == [[7, 7], [7, 7]]
    assert rows(padded["position_ids"])[2:] == [[0, 1], [0, 1]]
    assert rows(padded["prompts"])[2:] == [[7], [7]]
    assert rows(padded["responses"])[2:] == [[7], [7]]
    assert rows(padded["response_mask"])[2:] == [[0.0], [0.0]]
    assert rows(padded["experts"])[2:] == [[[0, 0], [0, 0]]] * 2
    assert padded.get("tools").tolist()[2:] == [[], []]
    assert len(set(padded.get("uid").tolist())) == 3


def test_padding_rows_of_dense_columns_sit_where_prompt_and_response_meet() -> None:
    batch = TensorDict(
        {
            "input_ids": torch.ones(2, 6, dtype=torch.int64),
            "attention_mask": torch.ones(2, 6, dtype=torch.int64),
            "position_ids": torch.arange(6).repeat(2, 1),
            "responses": torch.ones(2, 4, dtype=torch.int64),
            "response_mask": torch.ones(2, 4, dtype=torch.int64),
        },
        batch_size=[2],
    )
    padded = eq.pad_batch(batch, 1, eos_token_id=9)
    assert padded["attention_mask"][2].tolist() == [0, 1, 1, 0, 0, 0]
    assert padded["response_mask"][2].tolist() == [0, 0, 0, 0]
    assert padded["input_ids"][2].tolist() == [9] * 6
    assert padded["position_ids"][2, 1:3].tolist() == [0, 1]


def test_longer_padding_rows_have_their_tokens_in_the_prompt() -> None:
    padded = eq.pad_batch(rollout_batch([4, 5]), 2, eos_token_id=7, min_row_tokens=8)
    assert rows(padded["input_ids"])[2:] == [[7] * 8] * 2
    assert rows(padded["position_ids"])[2:] == [list(range(8))] * 2
    assert rows(padded["prompts"])[2:] == [[7] * 7] * 2
    assert rows(padded["responses"])[2:] == [[7], [7]]
    assert rows(padded["response_mask"])[2:] == [[0.0], [0.0]]
    assert rows(padded["experts"])[2:] == [[[0, 0]] * 8] * 2
    assert rows(padded["input_ids"])[:2] == rows(rollout_batch([4, 5])["input_ids"])


def test_side_data_of_the_prompt_is_as_long_as_a_padding_rows_prompt() -> None:
    batch = rollout_batch([5, 6], prompt=2)
    batch["prompt_kind"] = jagged([torch.ones(2), torch.ones(2)])
    assert rows(eq.pad_batch(batch, 1, eos_token_id=7, min_row_tokens=5)["prompt_kind"])[2] == [0.0] * 4
    batch = rollout_batch([4, 4], prompt=2)  # prompts and responses of equal length: the name decides
    padded = eq.pad_batch(batch, 1, eos_token_id=7, min_row_tokens=5)
    assert rows(padded["prompts"])[2] == [7] * 4
    assert rows(padded["response_mask"])[2] == [0.0]


@pytest.mark.parametrize(
    ("tokens", "attention", "positions"),
    [
        (2, [0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]),
        (4, [1, 1, 1, 1, 0, 0, 0], [0, 1, 2, 3, 3, 3, 3]),
        (6, [1, 1, 1, 1, 1, 1, 0], [0, 1, 2, 3, 4, 5, 5]),
        (7, [1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_longer_padding_rows_of_dense_columns(tokens: int, attention: list[int], positions: list[int]) -> None:
    batch = TensorDict(
        {
            "input_ids": torch.ones(2, 7, dtype=torch.int64),
            "attention_mask": torch.ones(2, 7, dtype=torch.bool),
            "position_ids": torch.arange(7).repeat(2, 3, 1),
            "responses": torch.ones(2, 4, dtype=torch.int64),
            "response_mask": torch.ones(2, 4, dtype=torch.int64),
        },
        batch_size=[2],
    )
    padded = eq.pad_batch(batch, 1, eos_token_id=9, min_row_tokens=tokens)
    assert padded["attention_mask"][2].tolist() == [bool(value) for value in attention]
    assert padded["position_ids"][2].tolist() == [positions] * 3
    assert padded["position_ids"].dtype == torch.int64
    assert padded["response_mask"][2].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("tokens", [1, 0, True, 2.5])
def test_a_padding_row_has_at_least_a_prompt_and_a_response_token(tokens: Any) -> None:
    with pytest.raises(eq.InvalidInput, match="min_row_tokens must be at least 2, a prompt token and a response token"):
        eq.pad_batch(rollout_batch([4, 5]), 1, eos_token_id=7, min_row_tokens=tokens)


def test_a_padding_row_fits_into_dense_columns() -> None:
    batch = TensorDict({"attention_mask": torch.ones(1, 4), "response_mask": torch.ones(1, 2)}, batch_size=[1])
    with pytest.raises(eq.InvalidInput, match="min_row_tokens must be at most 4, the width of column 'attention_mask'"):
        eq.pad_batch(batch, 1, eos_token_id=7, min_row_tokens=5)


def test_a11_an_empty_batch_cannot_be_padded() -> None:
    empty = TensorDict({"input_ids": torch.zeros(0, 3)}, batch_size=[0])
    with pytest.raises(eq.InvalidInput, match="batch must hold at least one row"):
        eq.pad_batch(empty, 1, eos_token_id=0)
