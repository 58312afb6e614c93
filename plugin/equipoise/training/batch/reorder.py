"""Reordering all columns of a batch together: dense, jagged and non-tensor ones."""

# tensordict annotates its columns loosely; the values are checked here at run time.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from equipoise._arrays import IntArray
from equipoise._checks import of_kind
from equipoise.errors import InvalidInput, must


def reorder(batch: TensorDict, order: Any) -> TensorDict:
    """Rows of ``batch`` in another order, or a selection of them.

    Dense and jagged tensors and stacks of non-tensors are reordered; a :class:`NonTensorData` belongs to the whole
    batch and stays.

    Args:
        batch: batch size (n,).
        order: row ids, shape (m,), each from 0 to n - 1: a list, a numpy array or a tensor.

    Returns:
        A new TensorDict of batch size (m,); dense columns are copies.

    Raises:
        InvalidInput: an id is out of range, or a column (named) does not have n rows.
    """
    return taken(batch, [row_ids(order, num_rows(batch))])[0]


def num_rows(batch: TensorDict) -> int:
    """Number of rows of a batch.

    Raises:
        InvalidInput: it is not a TensorDict, or has no batch dimension.
    """
    of_kind("batch", batch, TensorDictBase, "make one: TensorDict(columns, batch_size=[rows])")
    if not batch.batch_size:
        raise InvalidInput(must("batch_size", "have the rows first", [], "make it with batch_size=[rows]"))
    return batch.batch_size[0]


def rows_of(name: str, column: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a dense or jagged tensor.

    ``unbind`` fails on jagged tensors of more than two dimensions (pytorch/pytorch#153238), so rows are sliced from
    the flat values.

    Raises:
        InvalidInput: the tensor is nested, but not jagged.
    """
    if not column.is_nested:
        return list(column.unbind(0))
    lengths = row_lengths(name, column)
    starts = cast("list[int]", cast(Any, column).offsets()[:-1].tolist())
    values, ragged = cast(torch.Tensor, cast(Any, column).values()), ragged_dim(column) - 1
    return [values.narrow(ragged, start, length) for start, length in zip(starts, lengths, strict=True)]


def row_lengths(name: str, column: torch.Tensor) -> list[int]:
    """Lengths of the rows of a jagged tensor.

    Raises:
        InvalidInput: the tensor is not jagged.
    """
    if column.layout is not torch.jagged:
        remedy = "make it with torch.nested.as_nested_tensor(rows, layout=torch.jagged)"
        raise InvalidInput(must(f"column {name!r}", "be jagged", column.layout, remedy))
    lengths = cast(Any, column).lengths()
    return (cast(Any, column).offsets().diff() if lengths is None else lengths).tolist()


def token_lengths(data: TensorDict) -> IntArray:
    """Tokens of each row without padding, shape (rows,).

    Raises:
        InvalidInput: there are no ``input_ids``, or dense ones without an ``attention_mask``.
    """
    if num_rows(data) == 0:
        return np.zeros(0, dtype=np.int64)
    ids = data.get("input_ids", None)
    if not isinstance(ids, torch.Tensor):
        raise InvalidInput(must("data", "have a tensor 'input_ids'", sorted(map(str, data.keys())), "add it"))
    if ids.is_nested:
        return np.asarray(row_lengths("input_ids", ids), dtype=np.int64)
    mask = data.get("attention_mask", None)
    if not isinstance(mask, torch.Tensor):
        got = f"dense input_ids of shape {tuple(ids.shape)}"
        raise InvalidInput(must("data", "have jagged input_ids or an attention_mask", got, "pass real rows"))
    lengths = rows_of("attention_mask", mask.sum(-1)) if mask.is_nested else mask.sum(-1)
    return np.asarray([int(length) for length in lengths], dtype=np.int64)


def stack(values: Sequence[Any]) -> Any:
    """One non-tensor value per row (type checkers take tensordict's own constructor for abstract)."""
    return cast(Any, NonTensorStack)(*values)


def join_rows(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Rows as a jagged tensor with the ragged dimension of ``like``."""
    ragged = ragged_dim(like) - 1
    if ragged == 0 and rows:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    values = torch.cat(rows, dim=ragged) if rows else cast(Any, like).values().narrow(ragged, 0, 0)
    lengths = torch.tensor([row.shape[ragged] for row in rows], dtype=torch.int64, device=values.device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=ragged + 1)


def ragged_dim(column: torch.Tensor) -> int:
    """The ragged dimension of a jagged tensor."""
    return int(getattr(column, "_ragged_idx", 1))


def row_ids(order: Any, n: int) -> IntArray:
    """``order`` as ids of ``n`` rows.

    Raises:
        InvalidInput: not one-dimensional, not integers, or out of range.
    """
    rows = np.asarray(order)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise InvalidInput(must("order", "be one-dimensional row ids", rows.dtype.str, "pass plan.order"))
    rows = rows.astype(np.int64)
    outside = rows[(rows < 0) | (rows >= n)]
    if outside.size:
        wrong = int(outside[0])
        raise InvalidInput(must("order", f"hold row ids from 0 to {n - 1}", wrong, "plan the batch that you reorder"))
    return rows


def taken(batch: TensorDict, parts: list[IntArray]) -> list[TensorDict]:
    """Several selections of rows; each column is split only once.

    Raises:
        InvalidInput: a column (named) does not have the batch's rows.
    """
    n = num_rows(batch)
    columns: list[dict[str, Any]] = [{} for _ in parts]
    for name, column in batch.items():
        for selected, values in zip(columns, _column(str(name), column, parts, n), strict=True):
            selected[str(name)] = values
    return [
        TensorDict(selected, batch_size=[rows.size], device=batch.device)
        for selected, rows in zip(columns, parts, strict=True)
    ]


def _column(name: str, column: Any, parts: list[IntArray], n: int) -> list[Any]:
    """The rows of each selection."""
    if isinstance(column, torch.Tensor):
        if column.size(0) != n:
            raise _wrong_length(name, column.size(0), n)
        if column.is_nested:
            rows = rows_of(name, column)
            return [join_rows([rows[i] for i in part.tolist()], column) for part in parts]
        return [column[torch.from_numpy(part).to(column.device)] for part in parts]
    if isinstance(column, NonTensorStack):
        values = column.tolist()
        if len(values) != n:
            raise _wrong_length(name, len(values), n)
        return [stack([values[i] for i in part.tolist()]) for part in parts]
    if isinstance(column, NonTensorData):
        return [NonTensorData(column.data, batch_size=[part.size] if column.batch_size else []) for part in parts]
    if isinstance(column, TensorDict):
        return taken(column, parts)
    raise InvalidInput(must(f"column {name!r}", "be a tensor or non-tensor data", type(column).__name__, "convert it"))


def _wrong_length(name: str, rows: int, n: int) -> InvalidInput:
    return InvalidInput(must(f"column {name!r}", f"have the batch's {n} rows", rows, "fix or drop the column"))
