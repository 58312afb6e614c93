"""Padding rows: as short as an engine accepts, and without effect on any loss."""

# tensordict annotates its columns loosely; the values are checked here at run time.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from equipoise._checks import is_whole
from equipoise.errors import InvalidInput, must
from equipoise.training.batch.reorder import join_rows, num_rows, ragged_dim, row_lengths, rows_of, stack

_IDS = frozenset({"input_ids", "prompts", "responses", "teacher_ids"})
_POSITIONS = frozenset({"position_ids"})
_ATTENTION = frozenset({"attention_mask"})
_MEDIA = ("pixel_", "image_", "images", "video", "audio", "multi_modal")
_LEAST_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class _Padding:
    """Token and length of padding rows."""

    eos: int
    tokens: int

    def __post_init__(self) -> None:
        if not is_whole(self.tokens, _LEAST_TOKENS):
            rule = "be at least 2, a prompt token and a response token"
            raise InvalidInput(must("min_row_tokens", rule, self.tokens, "use 2, or what the engine aligns rows to"))

    def row(self, name: str, like: torch.Tensor, *, ragged: int, covered: int) -> torch.Tensor:
        """A row shaped like ``like``, but with ``covered`` tokens in dimension ``ragged``."""
        shape = list(like.shape)
        shape[ragged] = covered
        row = like.new_zeros(shape)
        if name in _IDS:
            row.fill_(self.eos)
        elif name in _ATTENTION:
            row.fill_(1)
        elif name in _POSITIONS:
            places = torch.arange(covered, device=row.device, dtype=row.dtype)
            row += places.reshape(-1, *[1] * (row.dim() - 1 - ragged))
        return row

    def covered(self, name: str, matches: Mapping[str, bool]) -> int:
        """Tokens of a padding row that a column covers: all, the prompt's, the response's, or none.

        Args:
            name: the column.
            matches: whether the column is as long as a given one in every row.
        """

        def like(*names: str) -> bool:
            return any(matches.get(other, False) for other in names)

        if name.startswith(_MEDIA):
            return 0
        if like("input_ids", "attention_mask", "position_ids"):
            return self.tokens
        if name == "prompts" or (like("prompts") and not like("responses", "response_mask")):
            return self.tokens - 1
        return int(like("responses", "response_mask"))


def pad_batch(
    batch: TensorDict, num_padding: int, *, eos_token_id: int, min_row_tokens: int = _LEAST_TOKENS
) -> TensorDict:
    """Append rows that change no loss: a prompt, one response token, zero masks and a new uid.

    A jagged column gets a value for each token of the prompt or the response if it covers them, and none if it covers
    neither, such as image patches. Dense columns are filled around the border between prompt and response, and are 0
    elsewhere (prompt tokens that do not fit continue into the response). Every padding row has its own ``uid``, so that
    no group statistic includes it; ``is_padding`` is True only for padding rows.

    Args:
        batch: batch size (n,), n at least 1, with ``input_ids`` and either ``responses`` or ``response_mask``.
        num_padding: rows to append, at least 0.
        eos_token_id: the token of padding rows.
        min_row_tokens: tokens of a padding row, at least 2, all but one in its prompt. More than 2 are for engines
            that align rows (tensor or context parallelism).

    Returns:
        A new TensorDict of batch size (n + num_padding,) with a boolean column ``is_padding``.

    Raises:
        InvalidInput: an empty batch, a negative number, too few tokens, too many for a dense column, or a column with
            the wrong number of rows.
    """
    n = num_rows(batch)
    if n == 0:
        raise InvalidInput(must("batch", "hold at least one row to take the columns from", 0, "skip the empty step"))
    if not is_whole(num_padding):
        raise InvalidInput(must("num_padding", "be a whole number of at least 0", num_padding, "pass rows to append"))
    padding = _Padding(eos=eos_token_id, tokens=min_row_tokens)
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        if name != "is_padding":
            columns[str(name)] = _extended(str(name), column, batch, num_padding, padding)
    was = batch.get("is_padding", None)
    before = torch.zeros(n, dtype=torch.bool) if was is None else was.bool()
    columns["is_padding"] = torch.cat([before, torch.ones(num_padding, dtype=torch.bool, device=before.device)])
    if "uid" not in columns:
        columns["uid"] = stack([*(f"row-{i}" for i in range(n)), *_own_uids(num_padding)])
    return TensorDict(columns, batch_size=[n + num_padding], device=batch.device)


def padding_row(row: Mapping[str, Any], *, eos_token_id: int, min_row_tokens: int = _LEAST_TOKENS) -> dict[str, Any]:
    """One padding row with the columns of ``row``, as :func:`pad_batch` makes them.

    Args:
        row: one unpadded row, by column: tensors without a batch dimension, and non-tensor values. ``input_ids``,
            ``prompts`` and ``responses`` (or ``response_mask``) determine what the other columns cover.
        eos_token_id: the token of the padding row.
        min_row_tokens: its tokens, at least 2, all but one in its prompt.

    Returns:
        The same columns. Masks, scores and side data are 0 or empty; ``uid`` is new; ``is_padding``, if there is such a
        column, is True.

    Raises:
        InvalidInput: there are too few tokens, or no ``input_ids``.

    >>> row = {"input_ids": torch.arange(9), "responses": torch.arange(4), "response_mask": torch.ones(4), "uid": "a"}
    >>> made = padding_row(row, eos_token_id=7)
    >>> made["input_ids"].tolist(), made["responses"].tolist(), made["response_mask"].tolist()
    ([7, 7], [7], [0.0])
    """
    padding = _Padding(eos=eos_token_id, tokens=min_row_tokens)
    ids = row.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1:
        raise InvalidInput(must("row", "have input_ids of one dimension", sorted(row), "pass one unpadded row"))
    lengths = {
        name: row[name].shape[-1]
        for name in ("input_ids", "prompts", "responses", "response_mask")
        if isinstance(row.get(name), torch.Tensor) and row[name].dim()
    }
    return {str(name): _value(str(name), value, lengths, padding) for name, value in row.items()}


def _own_uids(count: int) -> list[str]:
    return [f"padding-{uuid.uuid4().hex}" for _ in range(count)]


def _value(name: str, value: Any, lengths: Mapping[str, int], padding: _Padding) -> Any:
    """The padding row's counterpart of ``value``."""
    if name == "uid":
        return _own_uids(1)[0]
    if name == "is_padding":
        return torch.ones_like(value) if isinstance(value, torch.Tensor) else True
    if not isinstance(value, torch.Tensor) or not value.dim():
        return _neutral(value)
    # positions may have a dimension before the tokens (mRoPE), per-token data have theirs after it
    ragged = value.dim() - 1 if name in _POSITIONS else 0
    matches = {other: value.shape[ragged] == length for other, length in lengths.items()}
    if name.startswith(_MEDIA) or any(matches.values()):
        return padding.row(name, value, ragged=ragged, covered=padding.covered(name, matches))
    return torch.zeros_like(value)


def _extended(name: str, column: Any, batch: TensorDict, count: int, padding: _Padding) -> Any:
    n = batch.batch_size[0]
    if isinstance(column, torch.Tensor):
        if column.size(0) != n:
            raise InvalidInput(must(f"column {name!r}", f"have the batch's {n} rows", column.size(0), "fix it"))
        if column.is_nested:
            rows = rows_of(name, column)
            covered = padding.covered(name, _matches(row_lengths(name, column), batch))
            row = padding.row(name, rows[0], ragged=ragged_dim(column) - 1, covered=covered)
            return join_rows([*rows, *[row.clone() for _ in range(count)]], column)
        return torch.cat([column, _dense_row(name, column, batch, padding).expand(count, *column.shape[1:])])
    if isinstance(column, NonTensorStack):
        values = column.tolist()
        return stack([*values, *(_own_uids(count) if name == "uid" else [_neutral(values[0]) for _ in range(count)])])
    if isinstance(column, NonTensorData):
        return NonTensorData(column.data, batch_size=[n + count] if column.batch_size else [])
    raise InvalidInput(must(f"column {name!r}", "be a tensor or non-tensor data", type(column).__name__, "convert it"))


def _matches(lengths: list[int], batch: TensorDict) -> dict[str, bool]:
    """Jagged columns whose rows have these lengths."""
    return {
        str(name): lengths == row_lengths(str(name), column)
        for name, column in batch.items()
        if isinstance(column, torch.Tensor) and column.is_nested
    }


def _neutral(example: Any) -> Any:
    """An empty value of the same type: side data of one row must not count for another."""
    if isinstance(example, torch.Tensor):
        return torch.zeros_like(example) if not example.dim() else example[:0].clone()
    if isinstance(example, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", example)
        return np.zeros_like(array) if not array.ndim else array[:0].copy()
    if isinstance(example, TensorDictBase):
        return {}
    if isinstance(example, (list, tuple, dict, str, bytes, bool, int, float, np.number)):
        return type(example)()
    return None


def _dense_row(name: str, column: torch.Tensor, batch: TensorDict, padding: _Padding) -> torch.Tensor:
    """A (1, …) row whose tokens are where the left-padded prompt ends and the right-padded response starts."""
    row = column.new_zeros((1, *column.shape[1:]))
    if column.dim() < 2:
        return row
    if name in _IDS:
        return row.fill_(padding.eos)
    if name in _ATTENTION or name in _POSITIONS:
        width, tokens = column.shape[-1], padding.tokens
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
