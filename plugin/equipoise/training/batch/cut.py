"""From a rank's rows to micro-batches, and from outputs of micro-batches back to rows."""

# tensordict annotates its columns loosely; the values are checked here at run time.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from equipoise._arrays import IntArray
from equipoise.errors import InvalidInput, must
from equipoise.planning.step.result import StepPlan
from equipoise.training.batch.reorder import join_rows, num_rows, reorder, row_ids, rows_of, stack, taken

Outputs = TensorDict | Mapping[str, Any]


def consecutive(sizes: Sequence[int]) -> list[IntArray]:
    """Row ids of consecutive micro-batches of these sizes.

    >>> [rows.tolist() for rows in consecutive([2, 1])]
    [[0, 1], [2]]
    """
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    return [np.arange(end - size, end, dtype=np.int64) for size, end in zip(sizes, ends.tolist(), strict=True)]


def cut_rows(data: TensorDict, indices: Sequence[Sequence[int] | IntArray]) -> list[TensorDict]:
    """The micro-batches of a rank's rows.

    Dense and jagged tensors and stacks of non-tensors are split; a :class:`NonTensorData`, which belongs to the whole
    batch, goes to every micro-batch. A single micro-batch of all rows in order is ``data`` itself.

    Args:
        data: batch size (n,).
        indices: row ids of each micro-batch, from 0 to n - 1; :func:`consecutive` makes them from sizes.

    Returns:
        One TensorDict per micro-batch; dense columns are copies.

    Raises:
        InvalidInput: an id is out of range, or a column (named) does not have n rows.

    >>> data = TensorDict({"reward": torch.tensor([3, 1, 2])}, batch_size=[3])
    >>> [batch["reward"].tolist() for batch in cut_rows(data, consecutive([2, 1]))]
    [[3, 1], [2]]
    """
    n = num_rows(data)
    parts = [row_ids(rows, n) for rows in indices]
    if len(parts) == 1 and parts[0].size == n and bool((np.diff(parts[0]) == 1).all()):
        return [data]
    return taken(data, parts)


def join_outputs(outputs: Sequence[Outputs], indices: Sequence[Sequence[int] | IntArray]) -> TensorDict:
    """Outputs of micro-batches as one batch, sorted by row id: the inverse of :func:`cut_rows`.

    Args:
        outputs: one per micro-batch, in order, all with the same columns: dense, jagged or non-tensor.
        indices: row ids of each micro-batch, either of one rank or of the whole step.

    Raises:
        InvalidInput: the number of outputs, their columns or their rows do not match.

    >>> join_outputs([{"x": torch.tensor([7.0, 5.0])}, {"x": torch.tensor([6.0])}], [[2, 0], [1]])["x"].tolist()
    [5.0, 6.0, 7.0]
    """
    if len(outputs) != len(indices):
        rule = f"be one for each of the {len(indices)} micro-batches"
        raise InvalidInput(must("outputs", rule, len(outputs), "pass them all"))
    for i, (output, rows) in enumerate(zip(outputs, indices, strict=True)):
        if set(output.keys()) != set(outputs[0].keys()):
            rule = f"have the columns {sorted(map(str, outputs[0].keys()))} of the first"
            raise InvalidInput(must(f"outputs[{i}]", rule, sorted(map(str, output.keys())), "give all the same"))
        _check_rows(f"outputs[{i}]", output, len(rows))
    if not outputs:
        return TensorDict({}, batch_size=[0])
    ran = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in indices])
    sizes = [len(rows) for rows in indices]
    names = [str(name) for name in outputs[0].keys()]  # noqa: SIM118 - iterating a TensorDict gives its rows
    columns = {name: _concatenated(name, [output.get(name) for output in outputs], sizes) for name in names}
    return reorder(TensorDict(columns, batch_size=[ran.size]), np.argsort(ran, kind="stable"))


def restore(outputs: Sequence[TensorDict], plan: StepPlan, rank: int) -> TensorDict:
    """Outputs of a rank's micro-batches as one batch, in the caller's row order.

    Args:
        outputs: one per micro-batch of ``rank``, in execution order over all mini-batches.
        plan: the plan that was executed.
        rank: data-parallel rank.

    Returns:
        The rank's rows, sorted by row id; with one rank, that is the incoming order.

    Raises:
        InvalidInput: the number of outputs or their rows do not match the plan.
    """
    return join_outputs(outputs, [rows for mini_batch in plan.micro_batches(rank) for rows in mini_batch])


def _check_rows(field: str, output: Outputs, rows: int) -> None:
    remedy = "keep all rows of the micro-batch"
    if isinstance(output, TensorDict) and output.batch_size and output.batch_size[0] != rows:
        raise InvalidInput(must(f"rows of {field}", f"be {rows}", output.batch_size[0], remedy))
    for name, column in output.items():
        if isinstance(column, NonTensorData):
            continue
        found = len(column)
        if found != rows:
            raise InvalidInput(must(f"rows of {field}[{name!r}]", f"be {rows}", found, remedy))


def _concatenated(name: str, columns: list[Any], sizes: list[int]) -> Any:
    first = columns[0]
    if isinstance(first, torch.Tensor):
        if first.is_nested:
            return join_rows([row for column in columns for row in rows_of(name, column)], first)
        return torch.cat(columns)
    if isinstance(first, NonTensorStack):
        return stack([value for column in columns for value in column.tolist()])
    if isinstance(first, NonTensorData):
        return stack([column.data for column, size in zip(columns, sizes, strict=True) for _ in range(size)])
    raise InvalidInput(must(f"column {name!r}", "be a tensor or non-tensor data", type(first).__name__, "convert it"))
