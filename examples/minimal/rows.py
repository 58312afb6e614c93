"""Samples as rows of tensors."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# tensordict is typed in part only.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import NonTensorStack, TensorDict

import equipoise as eq
from examples.minimal.task import Task


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt by its number in the task, a response, and the response's reward."""

    number: int
    response: list[int]
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A step as every rank knows it: the rows of a step, where they go, what their losses are divided by."""

    batch: TensorDict
    plan: eq.StepPlan
    counts: tuple[eq.LossDenominators, ...]


def batch_of(samples: list[Sample], task: Task) -> TensorDict:
    """One row for each sample: tokens and mask of the response (both jagged), reward, and the prompt as ``uid``."""
    prompts = [task.prompt(sample.number) for sample in samples]
    rows = [torch.tensor(prompt + sample.response) for prompt, sample in zip(prompts, samples, strict=True)]
    masks = [(torch.arange(len(row)) >= len(prompt)).long() for row, prompt in zip(rows, prompts, strict=True)]
    columns: dict[str, Any] = {
        "input_ids": jagged(rows),
        "loss_mask": jagged(masks),
        "reward": torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        "uid": cast(Any, NonTensorStack)(*(str(sample.number) for sample in samples)),
    }
    return TensorDict(columns, batch_size=[len(rows)])


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths as one column."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def row_lengths(column: Any) -> list[int]:
    """Lengths of the rows of a jagged column."""
    return column.offsets().diff().tolist()
