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

from equipoise._checks import is_whole
from equipoise.errors import InvalidInput, must
from equipoise.training.batch.reorder import join_rows, num_rows, row_lengths, rows_of, stack

_IDS = frozenset({"input_ids", "prompts", "responses"})
_POSITIONS = frozenset({"position_ids"})
_ATTENTION = frozenset({"attention_mask"})
_LEAST_TOKENS = 2


def pad_batch(
    batch: TensorDict, num_padding: int, *, eos_token_id: int, min_row_tokens: int = _LEAST_TOKENS
) -> TensorDict:
    """Append rows that change no loss: a prompt, one response token, masks 0, a uid of their own.

    Jagged columns get one value for each token of the prompt and one for the response, as far as they cover them; dense
    columns are filled where prompt and response meet and are 0 elsewhere (tokens that do not fit before the response go
    on in its room). Every padding row has its own ``uid``, so that no group statistic meets it, and ``is_padding`` is
    True for it alone.

    Args:
        batch: batch size (n,), n at least 1, with ``input_ids`` and either ``responses`` or ``response_mask``.
        num_padding: rows to append, at least 0.
        eos_token_id: the token of padding rows.
        min_row_tokens: tokens of a padding row, all but one in its prompt; at least 2. More than that is for engines
            that align rows (tensor or context parallel).

    Returns:
        A new TensorDict of batch size (n + num_padding,) with a boolean column ``is_padding``.

    Raises:
        InvalidInput: an empty batch, a negative number, too few or (for a dense column) too many tokens, or a column of
            the wrong length.
    """
    n = num_rows(batch)
    if n == 0:
        raise InvalidInput(must("batch", "hold at least one row to take the columns from", 0, "skip the empty step"))
    if not is_whole(num_padding):
        raise InvalidInput(must("num_padding", "be a whole number of at least 0", num_padding, "pass rows to append"))
    tokens = min_row_tokens
    if not is_whole(tokens, _LEAST_TOKENS):
        rule = "be at least 2, a prompt token and a response token"
        raise InvalidInput(must("min_row_tokens", rule, tokens, "use 2, or what the engine aligns rows to"))
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        if name != "is_padding":
            columns[str(name)] = _extended(str(name), column, batch, num_padding, eos_token_id, tokens)
    was = batch.get("is_padding", None)
    before = torch.zeros(n, dtype=torch.bool) if was is None else was.bool()
    columns["is_padding"] = torch.cat([before, torch.ones(num_padding, dtype=torch.bool, device=before.device)])
    if "uid" not in columns:
        columns["uid"] = stack([*(f"row-{i}" for i in range(n)), *_own_uids(num_padding)])
    return TensorDict(columns, batch_size=[n + num_padding], device=batch.device)


def _own_uids(count: int) -> list[str]:
    return [f"padding-{uuid.uuid4().hex}" for _ in range(count)]


def _extended(name: str, column: Any, batch: TensorDict, count: int, eos: int, tokens: int) -> Any:
    n = batch.batch_size[0]
    if isinstance(column, torch.Tensor):
        if column.shape[0] != n:
            raise InvalidInput(must(f"column {name!r}", f"have the batch's {n} rows", column.shape[0], "mend it"))
        if column.is_nested:
            row = _jagged_row(name, column, batch, eos, tokens)
            return join_rows([*rows_of(column), *[row.clone() for _ in range(count)]], column)
        return torch.cat([column, _dense_row(name, column, batch, eos, tokens).expand(count, *column.shape[1:])])
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


def _jagged_row(name: str, column: torch.Tensor, batch: TensorDict, eos: int, tokens: int) -> torch.Tensor:
    """One row with a value for each token of prompt and response that the column covers."""
    covered = _covered(name, row_lengths(column), batch, tokens)
    like = rows_of(column)[0]
    ragged = int(getattr(column, "_ragged_idx", 1)) - 1
    shape = list(like.shape)
    shape[ragged] = covered
    row = like.new_zeros(shape)
    if name in _IDS:
        row.fill_(eos)
    elif name in _ATTENTION:
        row.fill_(1)
    elif name in _POSITIONS:
        row += torch.arange(covered, device=row.device, dtype=row.dtype)
    return row


def _covered(name: str, lengths: list[int], batch: TensorDict, tokens: int) -> int:
    """Tokens of a padding row that a jagged column of these lengths covers: all, the prompt's or the response's."""

    def like(*names: str) -> bool:
        others = (batch.get(other, None) for other in names)
        return any(isinstance(o, torch.Tensor) and o.is_nested and row_lengths(o) == lengths for o in others)

    if like("input_ids", "attention_mask", "position_ids"):
        return tokens
    if name == "prompts" or (like("prompts") and not like("responses", "response_mask")):
        return tokens - 1
    return 1


def _dense_row(name: str, column: torch.Tensor, batch: TensorDict, eos: int, tokens: int) -> torch.Tensor:
    """A (1, …) row; tokens sit where the left-padded prompt ends and the right-padded response begins."""
    row = column.new_zeros((1, *column.shape[1:]))
    if column.dim() < 2:
        return row
    if name in _IDS:
        return row.fill_(eos)
    if name in _ATTENTION or name in _POSITIONS:
        width = column.shape[-1]
        if tokens > max(width, _LEAST_TOKENS):
            rule = f"be at most {width}, the width of column {name!r}"
            raise InvalidInput(must("min_row_tokens", rule, tokens, "widen the dense columns or use fewer tokens"))
        response = batch.get("responses", batch.get("response_mask", None))
        meets = width - (response.shape[-1] if isinstance(response, torch.Tensor) else 1)
        start = max(0, min(meets + 1, width) - tokens)
        if name in _ATTENTION:
            row[..., start : start + tokens] = 1
        else:
            row += (torch.arange(width, device=row.device) - start).clamp(0, tokens - 1).to(row.dtype)
    return row
