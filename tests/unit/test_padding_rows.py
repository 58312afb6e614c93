"""Padding rows: short, and without effect on any loss or statistic."""

# tensordict annotates its columns loosely.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import equipoise as eq
from equipoise.training.batch import padding_row
from tests.unit.batch_rows import jagged, rollout_batch, rows, stack


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
