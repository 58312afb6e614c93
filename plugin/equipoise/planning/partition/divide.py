"""``partition``: weights into k parts by a named algorithm, with checked input and whole groups."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from equipoise._arrays import FloatArray, IntArray, counts, positions, sums
from equipoise._checks import as_vector, finite, positive
from equipoise.errors import InfeasiblePlan, InvalidInput, must
from equipoise.planning.partition import greedy, karmarkar_karp
from equipoise.planning.partition.board import Boards, Rules
from equipoise.planning.partition.refine import even_out_loads, polish
from equipoise.registry import Registry


class Partitioner(Protocol):
    """Divides weights that have been checked."""

    def __call__(self, weights: FloatArray, k: int, *, equal_size: bool) -> IntArray:
        """Part of each row, shape (n,); with ``equal_size``, n is a multiple of k and each part gets n / k rows."""
        ...


partitioners: Registry[Partitioner] = Registry("partitioner")


@partitioners.decorator("kk")
def karmarkar_karp_partition(weights: FloatArray, k: int, *, equal_size: bool) -> IntArray:
    """Karmarkar-Karp largest differencing."""
    return karmarkar_karp.equal_size(weights, k) if equal_size else karmarkar_karp.free_size(weights, k)


@partitioners.decorator("lpt")
def lpt_partition(weights: FloatArray, k: int, *, equal_size: bool) -> IntArray:
    """Longest processing time first."""
    limits = np.full(k, weights.size // k) if equal_size else None
    return greedy.longest_first(weights, k, max_rows=limits)


@partitioners.decorator("refined")
def refined_partition(weights: FloatArray, k: int, *, equal_size: bool) -> IntArray:
    """The better of "kk" and "lpt", improved by swaps and, if sizes are free, moves. Never worse than either."""
    if k == 1:
        return np.zeros(weights.size, dtype=np.int64)
    starts = np.stack([partitioners[name](weights, k, equal_size=equal_size) for name in ("kk", "lpt")])
    cost = np.repeat(weights[None, :], len(starts), axis=0)
    boards = Boards(cost, np.zeros(cost.shape, dtype=np.int64), starts, num_ranks=k, num_columns=1)
    rules = Rules(moves="none" if equal_size else "any")
    before = boards.lockstep()
    even_out_loads(boards, rules, tolerance=1e-6)
    polish(boards, rules)
    after = boards.lockstep()
    found = np.where((after <= before)[:, None], boards.cell, starts)
    return found[int(np.minimum(after, before).argmin())]


def partition(
    weights: Any, k: int, *, algorithm: str = "refined", equal_size: bool = False, group_ids: Any = None
) -> list[IntArray]:
    """Divide rows into k parts of nearly equal weight.

    Args:
        weights: one number of at least 0 per row, shape (n,).
        k: number of parts, at most n (with ``group_ids``, at most the number of groups).
        algorithm: a name in :data:`partitioners`: "refined", "kk" or "lpt".
        equal_size: each part gets n / k rows; n must be a multiple of k.
        group_ids: shape (n,); rows with the same id stay in one part.

    Returns:
        k arrays of row ids, none empty, ascending within a part; each row occurs once.

    Raises:
        InvalidInput: a weight is negative, NaN or infinite, k is out of range, or a shape is wrong.
        InfeasiblePlan: whole groups do not fit into parts of equal size.
        UnknownName: there is no such algorithm.

    >>> [part.tolist() for part in partition([8, 7, 6, 5, 4], 2)]
    [[0, 1], [2, 3, 4]]
    """
    values = checked_weights(weights)
    _check_parts(values.size, k, equal_size=equal_size)
    if group_ids is None:
        part = _divide(algorithm, values, k, equal_size=equal_size)
    else:
        part = _divide_groups(algorithm, values, k, equal_size=equal_size, group_ids=group_ids)
    return sorted(positions(part, k), key=lambda rows: int(rows[0]))


def group_numbers(group_ids: Any, n: int) -> IntArray:
    """Group of each row, numbered by first occurrence, shape (n,); ids may be anything hashable.

    Raises:
        InvalidInput: there is not one id for each row, or an id is not hashable.

    >>> group_numbers(["b", "a", "b"], 3).tolist()
    [0, 1, 0]
    """
    remedy = "pass one id per row, such as the uid of its prompt"
    try:
        ids: list[Any] = group_ids.tolist() if hasattr(group_ids, "tolist") else list(group_ids)
        number: dict[Any, int] = {}
        group = np.array([number.setdefault(name, len(number)) for name in ids], dtype=np.int64)
    except TypeError as error:
        rule = "be one hashable id for each row"
        raise InvalidInput(must("group_ids", rule, type(group_ids).__name__, f"{remedy} ({error})")) from error
    if group.shape != (n,):
        raise InvalidInput(must("group_ids", f"have shape {(n,)}", group.shape, remedy))
    return group


def checked_weights(weights: Any) -> FloatArray:
    """Weights as float64, shape (n,).

    Raises:
        InvalidInput: not a non-empty vector of finite numbers of at least 0.
    """
    values = as_vector("weights", weights, "pass one weight per row")
    if values.size == 0:
        raise InvalidInput(must("weights", "hold at least one row", [], "skip the step when the batch is empty"))
    if values.dtype.kind not in "iufb":
        raise InvalidInput(must("weights", "be numbers", str(values.dtype), "pass one weight per row"))
    values = values.astype(np.float64)
    finite("weights", values, "check the lengths or cost model")
    return values


def _check_parts(n: int, k: int, *, equal_size: bool) -> None:
    positive("k", k, "pass the number of parts")
    if k > n:
        raise InvalidInput(must("k", f"be at most the number of rows, {n}", k, f"use k <= {n} or add padding rows"))
    if equal_size and n % k:
        rule = f"be a multiple of k = {k} with equal_size=True"
        remedy = f"pad to {n + k - n % k} rows or pass equal_size=False"
        raise InfeasiblePlan(must("the number of rows", rule, n, remedy))


def _divide(algorithm: str, values: FloatArray, k: int, *, equal_size: bool) -> IntArray:
    part = partitioners[algorithm](values, k, equal_size=equal_size)
    size = counts(part, k)
    if size.size > k or size.min() < 1 or (equal_size and size.max() > values.size // k):
        rule = f"give {values.size} rows {k} parts, none empty"
        raise InvalidInput(must(f"partitioner {algorithm!r}", rule, size.tolist(), "return the part of each row"))
    return part


def _divide_groups(algorithm: str, values: FloatArray, k: int, *, equal_size: bool, group_ids: Any) -> IntArray:
    """Divide groups as if each were a row of its total weight."""
    group = group_numbers(group_ids, values.size)
    size = counts(group, int(group.max()) + 1)
    if k > size.size:
        rule = f"be at most the number of groups, {size.size}"
        raise InfeasiblePlan(must("k", rule, k, f"use k <= {size.size} or do not keep groups whole"))
    if equal_size and ((size != size[0]).any() or size.size % k):
        rule = f"form groups of one size, a multiple of k = {k} of them, with equal_size=True"
        groups = f"{size.size} groups of {int(size.min())} to {int(size.max())} rows"
        raise InfeasiblePlan(must("group_ids", rule, groups, "pass equal_size=False"))
    return _divide(algorithm, sums(group, values, size.size), k, equal_size=equal_size)[group]
