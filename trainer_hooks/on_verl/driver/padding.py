"""Padding rows in verl's TransferQueue, made by :func:`equipoise.pad_batch` as all padding rows are."""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import math
from typing import Any

from equipoise.planning.step import required_batch_multiple
from equipoise.trainer_hooks.on_verl.driver.stages import TrainerStages


def batch_multiple(stages: TrainerStages) -> int:
    """The number of rows must be a multiple of this: of the step's mini-batches, and of the ranks of each stage."""
    sizes = [rows for stage in stages.updates() if (rows := stages.settings(stage).mini_batch_rows) is not None]
    others = [stages.dp_size(stage) for stage in stages.all()]
    return math.lcm(required_batch_multiple(stages.dp_size("actor"), sizes), *others)


def pad_to_multiple(batch: Any, multiple: int, *, eos_token_id: int, row_tokens: int) -> Any:
    """Append padding rows to ``batch``, in place of verl's ``upsample_batch_to_divisible_size``.

    verl's padding rows have 128 tokens and share one uid; these have ``row_tokens``, and each is a group of its own.

    Args:
        batch: a ``KVBatchMeta`` of at least one row.
        multiple: of the number of rows.
        eos_token_id: the token of padding rows.
        row_tokens: tokens of a padding row, one of them the response.

    Returns:
        ``batch`` itself where no row is missing.
    """
    missing = -len(batch) % multiple
    if not missing:
        return batch
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta

    first = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)
    rows = padding_rows(first, missing, eos_token_id=eos_token_id, row_tokens=row_tokens)
    keys = [f"{uid}_0_0" for uid in rows.get("uid").tolist()]
    tag = {
        **copy.deepcopy(batch.tags[0]),
        "is_padding": True,
        "prompt_len": row_tokens - 1,
        "response_len": 1,
        "seq_len": row_tokens,
    }
    tags = [copy.deepcopy(tag) for _ in keys]
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=rows, tags=tags)
    return KVBatchMeta(
        keys=[*batch.keys, *keys],
        tags=[*batch.tags, *tags],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def padding_rows(first: Any, count: int, *, eos_token_id: int, row_tokens: int) -> Any:
    """``count`` padding rows with the columns of a batch of one row, as TransferQueue takes them: dense, all alike."""
    import torch
    from tensordict import TensorDict

    from equipoise.training.batch import pad_batch
    from equipoise.training.batch.reorder import rows_of, stack

    example = TensorDict({name: _by_token(name, column, first) for name, column in first.items()}, batch_size=[1])
    padded = pad_batch(example, count, eos_token_id=eos_token_id, min_row_tokens=row_tokens)
    columns: dict[str, Any] = {}
    for name, column in padded.items():
        if isinstance(column, torch.Tensor):
            columns[str(name)] = torch.stack(rows_of(column)[1:])
        else:
            columns[str(name)] = stack(column.tolist()[1:])
    del columns["is_padding"]  # verl has it in the tags
    return TensorDict(columns, batch_size=[count])


def _by_token(name: str, column: Any, first: Any) -> Any:
    """A column of one row, jagged along its tokens; as it is where it has no value for each token.

    TransferQueue hands out single rows as verl put them, and takes the first dimension for the tokens', also of
    positions of several dimensions, which have theirs last.
    """
    import torch

    if not isinstance(column, torch.Tensor):
        return column
    row = column.values() if column.is_nested else column[0]
    lengths = {first[of].values().shape[0] for of in ("input_ids", "prompts", "responses")}
    tokens = row.dim() - 1 if name == "position_ids" else 0
    if row.dim() == 0 or row.shape[tokens] not in lengths:
        return row[None]
    offsets = torch.tensor([0, row.shape[tokens]])
    return torch.nested.nested_tensor_from_jagged(row, offsets=offsets, jagged_dim=tokens + 1)
