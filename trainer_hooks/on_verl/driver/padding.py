"""Padding rows in verl's TransferQueue, made by :func:`~equipoise.training.batch.padding_row`."""

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

    verl's padding rows have 128 tokens and share one uid; these have ``row_tokens``, and each is its own group.

    Args:
        batch: a ``KVBatchMeta`` of at least one row.
        multiple: of the row count.
        eos_token_id: the token of padding rows.
        row_tokens: tokens of a padding row, one of them the response.

    Returns:
        ``batch`` itself if it needs no padding.
    """
    missing = -len(batch) % multiple
    if not missing:
        return batch
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from equipoise.training.batch import padding_row

    first: Any = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)[0]
    row = {name: first[name] for name in first.keys()}  # noqa: SIM118 - iterating a TensorDict yields its rows
    rows = [padding_row(row, eos_token_id=eos_token_id, min_row_tokens=row_tokens) for _ in range(missing)]
    keys = [f"{row['uid']}_0_0" for row in rows]
    tag = {**batch.tags[0], "is_padding": True}
    tag |= {"prompt_len": row_tokens - 1, "response_len": 1, "seq_len": row_tokens}
    tags = [copy.deepcopy(tag) for _ in rows]
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows), tags=tags)
    return KVBatchMeta(
        keys=[*batch.keys, *keys],
        tags=[*batch.tags, *tags],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )
