"""Every column of a batch moves together: dense, jagged and non-tensor ones."""

# tensordict annotates its columns loosely; the values are checked here at run time.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from equipoise._checks import of_kind
from equipoise.errors import InvalidInput, must
from equipoise.planning.step.result import StepPlan

IntArray = npt.NDArray[np.int64]


def reorder(batch: TensorDict, order: Any) -> TensorDict:
    """Rows of ``batch`` in another order (or a selection of them).

    Dense and jagged tensors, stacks of non-tensors and their side lists all move; a :class:`NonTensorData` belongs to
    the batch as a whole and stays.

    Args:
        batch: batch size (n,).
        order: row ids, shape (m,), each from 0 to n - 1: a list, a numpy array or a tensor.

    Returns:
        A new TensorDict of batch size (m,); dense columns are copies.

    Raises:
        InvalidInput: an id out of range, or a column that has not n rows (named).
    """
    n = num_rows(batch)
    rows = np.asarray(order)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise InvalidInput(must("order", "be one-dimensional row ids", rows.dtype.str, "pass plan.order"))
    rows = rows.astype(np.int64)
    outside = rows[(rows < 0) | (rows >= n)]
    if outside.size:
        wrong = int(outside[0])
        raise InvalidInput(must("order", f"hold row ids from 0 to {n - 1}", wrong, "plan the batch that you reorder"))
    index = torch.from_numpy(np.ascontiguousarray(rows))
    columns: dict[str, Any] = {}
    for name, column in batch.items():
        columns[str(name)] = _take(str(name), column, index, n)
    return TensorDict(columns, batch_size=[rows.size], device=batch.device)


def num_rows(batch: TensorDict) -> int:
    """Rows of a batch.

    Raises:
        InvalidInput: it is no TensorDict, or has no rows' dimension.
    """
    of_kind("batch", batch, TensorDictBase, "make one: TensorDict(columns, batch_size=[rows])")
    if not batch.batch_size:
        raise InvalidInput(must("batch_size", "have the rows first", [], "make it with batch_size=[rows]"))
    return batch.batch_size[0]


def restore(outputs: Sequence[TensorDict], plan: StepPlan, rank: int) -> TensorDict:
    """Outputs of a rank's micro-batches as one batch, rows in the caller's order.

    Args:
        outputs: one per micro-batch of ``rank``, in the order in which they ran (all mini-batches in turn).
        plan: the plan that they ran by.
        rank: data-parallel rank.

    Returns:
        The rank's rows, sorted by row id; with one rank that is the order of the batch as it came.

    Raises:
        InvalidInput: the number of outputs, or of rows in one, is not the plan's.
    """
    micro_batches = [rows for mini_batch in plan.micro_batches(rank) for rows in mini_batch]
    if len(outputs) != len(micro_batches):
        raise InvalidInput(
            must("outputs", f"be the {len(micro_batches)} micro-batches of rank {rank}", len(outputs), "pass them all")
        )
    for i, (output, rows) in enumerate(zip(outputs, micro_batches, strict=True)):
        if output.batch_size[0] != rows.size:
            raise InvalidInput(
                must(f"outputs[{i}]", f"have the {rows.size} rows of its micro-batch", output.batch_size[0], "keep all")
            )
    ran = np.concatenate(micro_batches)
    columns = {
        str(name): _concatenate([output[name] for output in outputs], str(name)) for name, _ in outputs[0].items()
    }
    together = TensorDict(columns, batch_size=[ran.size])
    return reorder(together, np.argsort(ran, kind="stable"))


def rows_of(column: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a dense or jagged tensor.

    ``unbind`` fails on jagged tensors of more than two dimensions, so rows are cut from the flat values.
    """
    if not column.is_nested:
        return list(column.unbind(0))
    if column.dim() == 2:
        return list(column.unbind(0))
    return list(column.values().split(row_lengths(column), dim=_ragged_dim(column) - 1))


def row_lengths(column: torch.Tensor) -> list[int]:
    """Lengths of the rows of a jagged tensor."""
    return cast(Any, column).offsets().diff().tolist()


def stack(values: Sequence[Any]) -> Any:
    """One non-tensor value a row (tensordict's own constructor is abstract to a type checker)."""
    return cast(Any, NonTensorStack)(*values)


def join_rows(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Rows as a jagged tensor with the ragged dimension of ``like``."""
    if like.is_nested and _ragged_dim(like) != 1:
        ragged = _ragged_dim(like) - 1
        values = torch.cat(rows, dim=ragged)
        lengths = torch.tensor([row.shape[ragged] for row in rows], device=values.device)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=_ragged_dim(like))
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _ragged_dim(column: torch.Tensor) -> int:
    return int(getattr(column, "_ragged_idx", 1))


def _take(name: str, column: Any, index: torch.Tensor, n: int) -> Any:
    if isinstance(column, torch.Tensor):
        if column.shape[0] != n:
            raise _wrong_length(name, column.shape[0], n)
        if column.is_nested:
            rows = rows_of(column)
            return join_rows([rows[i] for i in index.tolist()], column)
        return column[index.to(column.device)]
    if isinstance(column, NonTensorStack):
        values = column.tolist()
        if len(values) != n:
            raise _wrong_length(name, len(values), n)
        return stack([values[i] for i in index.tolist()])
    if isinstance(column, NonTensorData):
        return NonTensorData(column.data, batch_size=[index.numel()] if column.batch_size else [])
    if isinstance(column, TensorDict):
        return reorder(column, index)
    raise InvalidInput(must(f"column {name!r}", "be a tensor or non-tensor data", type(column).__name__, "convert it"))


def _wrong_length(name: str, rows: int, n: int) -> InvalidInput:
    return InvalidInput(must(f"column {name!r}", f"have the batch's {n} rows", rows, "mend or drop the column"))


def _concatenate(columns: list[Any], name: str) -> Any:
    first = columns[0]
    if isinstance(first, torch.Tensor):
        if first.is_nested:
            return join_rows([row for column in columns for row in rows_of(column)], first)
        return torch.cat(columns)
    if isinstance(first, NonTensorStack):
        return stack([value for column in columns for value in column.tolist()])
    if isinstance(first, NonTensorData):
        return stack([column.data for column in columns for _ in range(column.batch_size[0])])
    raise InvalidInput(must(f"column {name!r}", "be a tensor or non-tensor data", type(first).__name__, "convert it"))
