"""Rows of tensors: padding, reordering, putting outputs back."""

# tensordict annotates its columns loosely.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import equipoise as eq
from equipoise.training.batch import consecutive, cut_rows, join_outputs, padding_row


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


def test_a_padding_row_is_in_no_group() -> None:
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
    with pytest.raises(eq.InvalidInput, match=rf"min_row_tokens.*\b2\b.*got {tokens}"):
        eq.pad_batch(rollout_batch([4, 5]), 1, eos_token_id=7, min_row_tokens=tokens)


def test_a_padding_row_fits_into_dense_columns() -> None:
    batch = TensorDict({"attention_mask": torch.ones(1, 4), "response_mask": torch.ones(1, 2)}, batch_size=[1])
    with pytest.raises(eq.InvalidInput, match=r"min_row_tokens.*\b4\b.*'attention_mask'.*got 5"):
        eq.pad_batch(batch, 1, eos_token_id=7, min_row_tokens=5)


def test_an_empty_batch_cannot_be_padded() -> None:
    empty = TensorDict({"input_ids": torch.zeros(0, 3)}, batch_size=[0])
    with pytest.raises(eq.InvalidInput, match=r"batch.*got 0"):
        eq.pad_batch(empty, 1, eos_token_id=0)


def verl_like(lengths: list[int]) -> TensorDict:
    """Columns as verl sends them to a worker: jagged, mRoPE positions, lists of rows, settings of the whole batch."""
    n = len(lengths)
    positions = torch.nested.nested_tensor_from_jagged(
        torch.cat([torch.arange(4 * length).reshape(4, length) for length in lengths], dim=1),
        offsets=torch.tensor([0, *np.cumsum(lengths).tolist()]),
    )
    positions._ragged_idx = 2  # pyright: ignore[reportAttributeAccessIssue] - as verl's nested_tensor_from_tensor_list does
    return TensorDict(
        {
            "input_ids": jagged([torch.arange(length) + 10 * i for i, length in enumerate(lengths)]),
            "position_ids": positions,
            "pixel_values": jagged([torch.ones(4 * (i % 2), 3) for i in range(n)]),
            "advantages": torch.arange(n, dtype=torch.float32),
            "multi_modal_inputs": stack(*[{"image_grid_thw": [1, 2, 2]} if i % 2 else {} for i in range(n)]),
            "use_dynamic_bsz": NonTensorData(True),
            "temperature": NonTensorData(0.5, batch_size=[n]),
        },
        batch_size=[n],
    )


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


def test_a_padding_row_has_no_patch_and_no_image() -> None:
    """Case P6 of the reported cases: rows with 4, 0, 2, 0 patches and one padding row."""
    patches = [4, 0, 2, 0]
    batch = rollout_batch([4, 5, 6, 7])
    batch["pixel_values"] = jagged([torch.ones(count, 3) for count in patches])
    batch["images"] = stack(*[[object()] * (count // 2) for count in patches])
    batch["picture"] = stack(*[np.ones((count, 2)) for count in patches])
    batch["multi_modal_inputs"] = stack(*[{"image_grid_thw": [count]} for count in patches])
    padded = eq.pad_batch(batch, 1, eos_token_id=7)
    assert cast(Any, padded["pixel_values"]).offsets().diff().tolist() == [*patches, 0]
    assert padded.get("images").tolist()[-1] == []
    assert padded.get("picture").tolist()[-1].size == 0
    assert padded.get("multi_modal_inputs").tolist()[-1] == {}


def test_one_padding_row_is_as_the_rows_of_a_padded_batch() -> None:
    batch = rollout_batch([9, 5], prompt=3)
    batch["pixel_values"] = jagged([torch.ones(6, 3), torch.ones(0, 3)])  # as many patches as response tokens
    batch["images"] = stack(["a"], [])
    names = [str(name) for name in batch.keys() if name != "temperature"]  # noqa: SIM118
    first = {name: batch.get(name).tolist()[0] if is_side(batch.get(name)) else batch[name][0] for name in names}
    made = padding_row(first, eos_token_id=7, min_row_tokens=4)
    padded = eq.pad_batch(batch, 1, eos_token_id=7, min_row_tokens=4)
    for name in names:
        want = padded.get(name).tolist()[-1] if is_side(batch.get(name)) else padded[name][-1]
        if isinstance(want, torch.Tensor):
            assert torch.equal(made[name], want), name
        elif name != "uid":
            assert made[name] == want
    assert made["uid"] != padded.get("uid").tolist()[-1] != "u0"


def is_side(column: Any) -> bool:
    return not isinstance(column, torch.Tensor)


def test_a_padding_row_of_verls_columns() -> None:
    """Positions with four numbers a token, chosen experts, scores of the response, and fields that are no tensors."""
    row = {
        "prompts": torch.arange(5),
        "responses": torch.arange(3),
        "input_ids": torch.arange(8),
        "attention_mask": torch.ones(8, dtype=torch.int64),
        "position_ids": torch.arange(8).repeat(4, 1),
        "response_mask": torch.ones(3, dtype=torch.int64),
        "rm_scores": torch.ones(3),
        "rollout_log_probs": torch.ones(3),
        "routed_experts": torch.ones(8, 2, 4, dtype=torch.int64),
        "teacher_logprobs": torch.ones(8, 16),
        "num_turns": 4,
        "multi_modal_inputs": {"pixel_values": torch.ones(4, 3)},
        "raw_prompt": [{"role": "user"}],
        "uid": "u",
    }
    made = padding_row(row, eos_token_id=2, min_row_tokens=128)
    shapes = {name: tuple(value.shape) for name, value in made.items() if isinstance(value, torch.Tensor)}
    assert shapes == {
        "prompts": (127,),
        "responses": (1,),
        "input_ids": (128,),
        "attention_mask": (128,),
        "position_ids": (4, 128),
        "response_mask": (1,),
        "rm_scores": (1,),
        "rollout_log_probs": (1,),
        "routed_experts": (128, 2, 4),
        "teacher_logprobs": (128, 16),
    }
    assert made["position_ids"].tolist() == [list(range(128))] * 4
    assert made["attention_mask"].sum() == 128
    assert all(not made[name].any() for name in ("response_mask", "rm_scores", "rollout_log_probs", "routed_experts"))
    assert (made["num_turns"], made["multi_modal_inputs"], made["raw_prompt"]) == (0, {}, [])
    with pytest.raises(eq.InvalidInput, match="input_ids"):
        padding_row({"prompts": torch.arange(5)}, eos_token_id=2)
