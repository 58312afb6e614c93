"""``plan_step``: lengths in, a plan out. Start reading here.

For each mini-batch the planner takes the fewest micro-batches that can work, lays the rows out by several rules, evens
the layouts out by search under the cap, and keeps the best. It never keeps a layout that costs more than one of the
rules alone, nor than the batch as it came.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, int_sums, sums
from equipoise.errors import EquipoiseWarning, InfeasiblePlan, InvalidInput, must
from equipoise.partition.board import Boards, Rules
from equipoise.partition.refine import even_out_loads, fit_cap, polish
from equipoise.plan import starts
from equipoise.plan.makeup import check_counts, mini_batch_rows, rank_rows
from equipoise.plan.result import StepPlan, measure
from equipoise.plan.spec import StepSpec
from equipoise.plan.starts import MiniBatch
from equipoise.workload import CostModel, TransformerCost, as_lengths, row_costs


def plan_step(
    lengths: Any,
    spec: StepSpec,
    *,
    cost: CostModel | None = None,
    is_padding: Any = None,
) -> StepPlan:
    """Plan one trainer step from the lengths of its rows.

    Each row gets a mini-batch, a rank and a micro-batch, such that the real tokens of every micro-batch are within the
    cap, all ranks run the same number of micro-batches, none empty, and the lockstep cost is low. The plan is a pure
    function of its arguments.

    The figures in ``plan.incoming`` are those of the same mini-batches with each rank taking a contiguous share and
    filling its micro-batches in order under the cap.

    Args:
        lengths: tokens of each row, shape (n,): a list, a numpy array or a CPU tensor.
        spec: the trainer's settings.
        cost: cost model; ``TransformerCost()`` if None.
        is_padding: shape (n,), True for padding rows; None for no padding.

    Returns:
        The plan.

    Raises:
        InvalidInput: a length or flag is not what it should be.
        InfeasiblePlan: settings and lengths exclude each other; names both and the nearest legal value.

    >>> spec = StepSpec(dp_size=2, max_token_len_per_gpu=10)
    >>> plan = plan_step([9, 1, 5, 5], spec)
    >>> [[rows.tolist() for rows in plan.micro_batches(rank)[0]] for rank in range(2)]
    [[[0, 1]], [[2, 3]]]

    """
    tokens = as_lengths(lengths)
    padding = _flags(is_padding, tokens.size)
    costs = row_costs(cost if cost is not None else TransformerCost(), tokens)
    check_counts(tokens.size, int((~padding).sum()), spec)
    _check_oversize(tokens, spec)
    members = mini_batch_rows(tokens, padding, spec)
    real = np.array([int((~padding[rows]).sum()) for rows in members])
    quota, real_quota = rank_rows(np.array([rows.size for rows in members]), real, spec.dp_size)
    minis = [
        MiniBatch(
            cost=costs[rows],
            tokens=tokens[rows],
            padding=padding[rows],
            rows=quota[j],
            real_rows=real_quota[j],
            fixed_rows=spec.micro_batch_size_per_gpu,
        )
        for j, rows in enumerate(members)
    ]
    layouts = _search(minis, spec)
    order, sizes = _dispatch_order(layouts, members, spec)
    came = [_incoming(mini, spec) for mini in minis]
    came_order, came_sizes = _dispatch_order(came, members, spec, sort_columns=False)
    num_padding = int(padding.sum())
    real.flags.writeable = False
    return StepPlan(
        spec=spec,
        order=order,
        sizes=sizes,
        num_real_rows=real,
        stats=measure(costs, tokens, order, sizes, num_padding=num_padding),
        incoming=measure(costs, tokens, came_order, came_sizes, num_padding=num_padding),
    )


@dataclass(frozen=True)
class _Layout:
    """Cell of each row of one mini-batch, and what the layout costs in lockstep."""

    cell: IntArray
    num_columns: int
    mini: MiniBatch

    def loads(self) -> FloatArray:
        """Cost of each cell, shape (num_columns, dp_size)."""
        cells = self.num_columns * self.mini.dp_size
        return sums(self.cell, self.mini.cost, cells).reshape(self.num_columns, self.mini.dp_size)

    def lockstep(self) -> float:
        return float(self.loads().max(axis=1).sum())

    def legal(self, cap: int | None) -> bool:
        """No cell empty, and none above the cap but lone rows."""
        cells = self.num_columns * self.mini.dp_size
        count = counts(self.cell, cells)
        if count.min() == 0:
            return False
        if cap is None:
            return True
        fill = int_sums(self.cell, self.mini.tokens, cells)
        return not bool(((fill > cap) & (count > 1)).any())


def _flags(is_padding: Any, n: int) -> BoolArray:
    if is_padding is None:
        return np.zeros(n, dtype=bool)
    flags = np.asarray(is_padding)
    if flags.shape != (n,):
        raise InvalidInput(must("is_padding", f"have shape {(n,)}", flags.shape, "pass one flag per row"))
    return flags.astype(bool)


def _check_oversize(tokens: IntArray, spec: StepSpec) -> None:
    if spec.cap is None or int(tokens.max()) <= spec.cap:
        return
    row = int(tokens.argmax())
    over = int((tokens > spec.cap).sum())
    text = must(
        f"lengths[{row}]",
        f"be at most the cap, max_token_len_per_gpu × sp_size = {spec.max_token_len_per_gpu} × {spec.sp_size}"
        f" = {spec.cap}",
        int(tokens[row]),
        f"raise max_token_len_per_gpu to {-(-int(tokens[row]) // spec.sp_size)} or shorten the row"
        + (f" ({over} rows are above the cap)" if over > 1 else ""),
    )
    if spec.oversize == "error":
        raise InfeasiblePlan(text)
    warnings.warn(f"{text}; it gets a micro-batch of its own", EquipoiseWarning, stacklevel=3)


def _incoming(mini: MiniBatch, spec: StepSpec) -> _Layout:
    cell, columns = starts.as_it_came(mini, spec.min_micro_batches, spec.cap)
    return _Layout(cell, columns, mini)


def _fewest_columns(mini: MiniBatch, spec: StepSpec) -> int:
    """A number of micro-batches below which no layout fits."""
    multiple = spec.micro_batch_multiple
    if mini.fixed_rows is not None:
        return int(mini.rows[0]) // mini.fixed_rows
    least = spec.min_micro_batches
    if spec.cap is not None:
        ranks = mini.dp_size
        alone = mini.tokens > spec.cap
        rest = mini.tokens[~alone]
        wide = int((rest * 2 > spec.cap).sum())  # no two of these share a cell
        bins = int(alone.sum()) + max(-(-int(rest.sum()) // spec.cap), wide)
        least = max(least, -(-bins // ranks))
    return -(-least // multiple) * multiple


def _most_columns(mini: MiniBatch, spec: StepSpec) -> int:
    return int(mini.rows.min()) // spec.micro_batch_multiple * spec.micro_batch_multiple


def _check_fixed(minis: list[MiniBatch], spec: StepSpec) -> None:
    size = spec.micro_batch_size_per_gpu
    if size is None:
        return
    for mini in minis:
        rows = int(mini.rows[0])
        if (mini.rows % size).any():
            legal = [b for b in range(1, rows + 1) if rows % b == 0]
            remedy = f"use one of {legal}, or {rows + size - rows % size} rows for each rank"
            raise InfeasiblePlan(
                must("micro_batch_size_per_gpu", f"divide the {rows} rows of a rank in a mini-batch", size, remedy)
            )
        count = rows // size
        if count % spec.micro_batch_multiple or count < spec.min_micro_batches:
            raise InfeasiblePlan(
                must(
                    "micro_batch_size_per_gpu",
                    f"give a multiple of micro_batch_multiple = {spec.micro_batch_multiple} and at least "
                    f"min_micro_batches = {spec.min_micro_batches} micro-batches of the {rows} rows of a rank",
                    size,
                    f"it gives {count}; choose a size that gives a legal number",
                )
            )


def _infeasible(mini: MiniBatch, spec: StepSpec, tried: int) -> InfeasiblePlan:
    most = int(mini.rows.min())
    if tried > most and spec.micro_batch_multiple > 1:
        legal = -(-tried // spec.micro_batch_multiple) * spec.micro_batch_multiple
        return InfeasiblePlan(
            must(
                "micro_batch_multiple",
                f"leave no micro-batch empty: {legal} micro-batches are needed and a rank has {most} rows",
                spec.micro_batch_multiple,
                f"raise max_token_len_per_gpu = {spec.max_token_len_per_gpu}, use a multiple of at most {most}, or give"
                f" each rank at least {legal} rows of a mini-batch",
            )
        )
    return InfeasiblePlan(
        must(
            "min_micro_batches",
            f"be at most the {most} rows that a rank has in a mini-batch",
            spec.min_micro_batches,
            f"use at most {most} or larger mini-batches",
        )
    )


def _search(minis: list[MiniBatch], spec: StepSpec) -> list[_Layout]:
    """The best layout found for each mini-batch."""
    _check_fixed(minis, spec)
    found: list[_Layout | None] = [None] * len(minis)
    columns = [_fewest_columns(mini, spec) for mini in minis]
    while True:
        waiting = [j for j, layout in enumerate(found) if layout is None]
        if not waiting:
            break
        for j in waiting:
            if columns[j] > _most_columns(minis[j], spec):
                raise _infeasible(minis[j], spec, columns[j])
        for shape in sorted({(columns[j], minis[j].cost.size) for j in waiting}):
            group = [j for j in waiting if (columns[j], minis[j].cost.size) == shape]
            for j, layout in zip(group, _layouts([minis[j] for j in group], shape[0], spec), strict=True):
                found[j] = layout
                if layout is None:
                    columns[j] += spec.micro_batch_multiple
    return [_at_least_as_good(layout, spec) for layout in found if layout is not None]


def _layouts(minis: list[MiniBatch], num_columns: int, spec: StepSpec) -> list[_Layout | None]:
    """Best layout of each mini-batch in ``num_columns`` columns; None where none was found within the cap."""
    if spec.algorithm != "refined":
        plain = [_Layout(starts.by_ranks(mini, num_columns, spec.algorithm), num_columns, mini) for mini in minis]
        return [layout if layout.legal(spec.cap) else None for layout in plain]
    rules = starts.by_tiers, starts.by_stripes
    cells = np.stack([rule(mini, num_columns) for mini in minis for rule in rules])
    cost = np.stack([mini.cost for mini in minis for _ in rules])
    tokens = np.stack([mini.tokens for mini in minis for _ in rules])
    kind = np.stack([mini.padding for mini in minis for _ in rules]).astype(np.int64)
    boards = Boards(
        cost,
        tokens,
        cells,
        num_ranks=minis[0].dp_size,
        num_columns=num_columns,
        kind=kind if kind.any() else None,
    )
    moves = "none" if spec.micro_batch_size_per_gpu is not None or num_columns == 1 else "rank"
    limits = Rules(cap=spec.cap, moves=moves)
    fits = np.ones(boards.num_boards, dtype=bool)
    if spec.cap is not None:
        fits = fit_cap(boards, spec.cap, limits)
    even_out_loads(boards, limits)
    lockstep = np.where(fits, boards.lockstep(), np.inf).reshape(len(minis), len(rules))
    best = np.arange(len(minis)) * len(rules) + lockstep.argmin(axis=1)
    boards = boards.select(best)
    polish(boards, limits)
    layouts = [_Layout(boards.cell[j], num_columns, mini) for j, mini in enumerate(minis)]
    return [layout if fits[best[j]] and layout.legal(spec.cap) else None for j, layout in enumerate(layouts)]


def _at_least_as_good(layout: _Layout, spec: StepSpec) -> _Layout:
    """``layout``, or one of the plain rules or the batch as it came where that costs less."""
    rivals = [_incoming(layout.mini, spec)]
    if spec.algorithm == "refined":
        rivals += [_plain(layout.mini, spec, name) for name in ("kk", "lpt")]
    best = layout
    for rival in rivals:
        if rival is None or rival.num_columns % spec.micro_batch_multiple or not rival.legal(spec.cap):
            continue
        if rival.lockstep() < best.lockstep():
            best = rival
    return best


def _plain(mini: MiniBatch, spec: StepSpec, algorithm: str) -> _Layout | None:
    """What ``algorithm`` alone would return: the fewest columns in which its layout fits."""
    columns = _fewest_columns(mini, spec)
    while columns <= _most_columns(mini, spec):
        layout = _Layout(starts.by_ranks(mini, columns, algorithm), columns, mini)
        if layout.legal(spec.cap):
            return layout
        columns += spec.micro_batch_multiple
    return None


def _dispatch_order(
    layouts: list[_Layout], members: list[IntArray], spec: StepSpec, *, sort_columns: bool = True
) -> tuple[IntArray, tuple[IntArray, ...]]:
    """Row ids rank-major, then mini-batch, then micro-batch, and the sizes of the micro-batches.

    The costliest micro-batch of a mini-batch runs first: a step that would run out of memory does so at once.
    """
    n = sum(rows.size for rows in members)
    row = np.concatenate(members)
    mini_of, rank_of, column_of = (np.empty(n, dtype=np.int64) for _ in range(3))
    sizes: list[IntArray] = []
    at = 0
    for j, layout in enumerate(layouts):
        ranks, columns = layout.mini.dp_size, layout.num_columns
        place = np.arange(columns)
        if sort_columns:
            place[np.argsort(-layout.loads().max(axis=1), kind="stable")] = np.arange(columns)
        part = slice(at, at + layout.cell.size)
        at += layout.cell.size
        mini_of[part] = j
        rank_of[part] = layout.cell % ranks
        column_of[part] = place[layout.cell // ranks]
        flat = rank_of[part] * columns + column_of[part]
        sizes.append(counts(flat, ranks * columns).reshape(ranks, columns))
    order = row[np.lexsort((row, column_of, mini_of, rank_of))]
    order.flags.writeable = False
    for size in sizes:
        size.flags.writeable = False
    return order, tuple(sizes)
