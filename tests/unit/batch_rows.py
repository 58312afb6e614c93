"""Batches for the tests of rows."""

# tensordict annotates its columns loosely.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict


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
