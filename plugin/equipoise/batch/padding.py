"""Padding rows: the least that an engine accepts, and nothing in any loss."""

# tensordict annotates its columns loosely; the values are checked here at run time.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import uuid
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from equipoise.batch.reorder import join_rows, row_lengths, rows_of, stack
from equipoise.errors import InvalidInput, must

_IDS = frozenset({"input_ids", "prompts", "responses"})
_POSITIONS = frozenset({"position_ids"})
_ATTENTION = frozenset({"attention_mask"})


def pad_batch(batch: TensorDict, num_padding: int, *, eos_token_id: int) -> TensorDict:
    """Append rows that change no loss: one prompt token, one response token, masks 0, a uid of their own.

    Jagged columns get one value for the prompt and one for the response, as far as they cover them; dense columns are
    filled at the two places where prompt and response meet and are 0 elsewhere. Every padding row has its own ``uid``,
    so that no group statistic meets it, and ``is_padding`` is True for it alone.

    Args:
        batch: batch size (n,), n at least 1, with ``input_ids`` and either ``responses`` or ``response_mask``.
        num_padding: rows to append, at least 0.
        eos_token_id: the token of padding rows.

    Returns:
        A new TensorDict of batch size (n + num_padding,) with a boolean column ``is_padding``.

    Raises:
        InvalidInput: an empty batch, a negative number, or a column of the wrong length.
    """
    n = batch.batch_size[0]
    if n == 0:
        raise InvalidInput(must("batch", "hold at least one row to take the columns from", 0, "skip the empty step"))
    if isinstance(num_padding, bool) or num_padding < 0:
        raise InvalidInput(must("num_padding", "be a whole number of at least 0", num_padding, "pass rows to append"))
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        if name != "is_padding":
            columns[str(name)] = _extended(str(name), column, batch, num_padding, eos_token_id)
    was = batch.get("is_padding", None)
    before = torch.zeros(n, dtype=torch.bool) if was is None else was.bool()
    columns["is_padding"] = torch.cat([before, torch.ones(num_padding, dtype=torch.bool, device=before.device)])
    if "uid" not in columns:
        columns["uid"] = stack([*(f"row-{i}" for i in range(n)), *_own_uids(num_padding)])
    return TensorDict(columns, batch_size=[n + num_padding], device=batch.device)


def _own_uids(count: int) -> list[str]:
    return [f"padding-{uuid.uuid4().hex}" for _ in range(count)]


def _extended(name: str, column: Any, batch: TensorDict, count: int, eos: int) -> Any:
    n = batch.batch_size[0]
    if isinstance(column, torch.Tensor):
        if column.shape[0] != n:
            raise InvalidInput(must(f"column {name!r}", f"have the batch's {n} rows", column.shape[0], "mend it"))
        if column.is_nested:
            row = _jagged_row(name, column, batch, eos)
            return join_rows([*rows_of(column), *[row.clone() for _ in range(count)]], column)
        return torch.cat([column, _dense_row(name, column, batch, eos).expand(count, *column.shape[1:])])
    if isinstance(column, NonTensorStack):
        values = column.tolist()
        return stack([*values, *(_own_uids(count) if name == "uid" else _neutral(values[0], count))])
    if isinstance(column, NonTensorData):
        return NonTensorData(column.data, batch_size=[n + count] if column.batch_size else [])
    raise InvalidInput(must(f"column {name!r}", "be a tensor or non-tensor data", type(column).__name__, "convert it"))


def _neutral(example: Any, count: int) -> list[Any]:
    """An empty value of the example's kind: side data of one row must not be counted for another."""
    if isinstance(example, (list, tuple, dict, str)):
        return [type(example)() for _ in range(count)]
    if isinstance(example, (bool, int, float, np.number)):
        return [type(example)(0) for _ in range(count)]
    return [None if example is None else copy.deepcopy(example) for _ in range(count)]


def _jagged_row(name: str, column: torch.Tensor, batch: TensorDict, eos: int) -> torch.Tensor:
    """One row with a value for each of prompt and response that the column covers."""
    lengths = row_lengths(column)
    tokens = 1
    for other in ("input_ids", "attention_mask", "position_ids"):
        whole = batch.get(other, None)
        if isinstance(whole, torch.Tensor) and whole.is_nested and row_lengths(whole) == lengths:
            tokens = 2
            break
    like = rows_of(column)[0]
    ragged = int(getattr(column, "_ragged_idx", 1)) - 1
    shape = list(like.shape)
    shape[ragged] = tokens
    row = like.new_zeros(shape)
    if name in _IDS:
        row.fill_(eos)
    elif name in _ATTENTION:
        row.fill_(1)
    elif name in _POSITIONS:
        row += torch.arange(tokens, device=row.device, dtype=row.dtype)
    return row


def _dense_row(name: str, column: torch.Tensor, batch: TensorDict, eos: int) -> torch.Tensor:
    """A (1, …) row; tokens sit where the left-padded prompt ends and the right-padded response begins."""
    row = column.new_zeros((1, *column.shape[1:]))
    if column.dim() < 2:
        return row
    if name in _IDS:
        return row.fill_(eos)
    if name in _ATTENTION or name in _POSITIONS:
        width = column.shape[-1]
        response = batch.get("responses", batch.get("response_mask", None))
        meets = width - (response.shape[-1] if isinstance(response, torch.Tensor) else 1)
        start = max(0, min(meets - 1, width - 2))
        if name in _ATTENTION:
            row[..., start : start + 2] = 1
        else:
            row[..., start + 1 :] = 1
    return row
