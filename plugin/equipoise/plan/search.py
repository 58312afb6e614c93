"""The search for layouts: few micro-batches first, several starts for each, and never worse than a plain rule."""

from __future__ import annotations

import numpy as np

from equipoise._arrays import sums
from equipoise.partition.board import Boards, Rules
from equipoise.partition.bounds import mini_batch_bound
from equipoise.partition.deepen import MAX_ROWS, SmallBoard, deepen
from equipoise.partition.ranks import level_ranks
from equipoise.partition.refine import even_out_loads, fit_cap, polish
from equipoise.plan import starts
from equipoise.plan.layout import Layout, MiniBatch
from equipoise.plan.limits import fewest_columns, most_columns, out_of_room, roomiest
from equipoise.plan.spec import StepSpec

_WORTH_A_TRY = 0.975  # of a layout's cost: what is closer to its bound is not searched again with more micro-batches
_ROUNDS_OF_A_START, _ROUNDS = 12, 36  # of pairwise changes: on every start, then on the best
_DEEP_LOADS = 12_000_000  # of all small mini-batches together: some 0.1 s


def search(minis: list[MiniBatch], spec: StepSpec) -> list[Layout]:
    """The best layout found for each mini-batch.

    Raises:
        InfeasiblePlan: the rows of one do not fit under the cap in as many micro-batches as there may be.

    """
    if spec.algorithm == "refined":
        found = _refined(minis, spec)
    else:
        found = [_by_rule(mini, spec, spec.algorithm) for mini in minis]
    layouts = [layout for layout in found if layout is not None]
    if len(layouts) < len(minis):
        raise out_of_room(minis, spec)
    return [_at_least_as_good(layout, spec) for layout in layouts]


def tight_bound(mini: MiniBatch, spec: StepSpec) -> float:
    """Lockstep cost that no layout of the mini-batch is below (see :mod:`equipoise.partition.bounds`)."""
    return mini_batch_bound(
        mini.cost, mini.tokens, num_ranks=mini.dp_size, cap=spec.cap, rows_per_rank=int(mini.rows.min())
    )


def _refined(minis: list[MiniBatch], spec: StepSpec) -> list[Layout | None]:
    """Search in the fewest columns that may work, then in more for those that do not fit."""
    found: list[Layout | None] = [None] * len(minis)
    columns = [fewest_columns(mini, spec) for mini in minis]
    waiting = list(range(len(minis)))
    while waiting:
        shapes: dict[tuple[int, int], list[int]] = {}  # boards of one shape are searched together
        for j in waiting:
            if columns[j] <= most_columns(minis[j], spec):
                shapes.setdefault((columns[j], minis[j].cost.size), []).append(j)
            else:
                found[j] = _last_resort(minis[j], spec)
        waiting = []
        for (num_columns, _), group in shapes.items():
            for j, layout in zip(group, _search_together([minis[j] for j in group], num_columns, spec), strict=True):
                found[j] = layout
                if layout is None:
                    columns[j] += spec.micro_batch_multiple
                    waiting.append(j)
    return [None if layout is None else _with_more_columns(layout, spec) for layout in found]


def _with_more_columns(layout: Layout, spec: StepSpec) -> Layout:
    """``layout``, or one in the next number of micro-batches where that pays.

    It is looked for only where the bound leaves room for it: a fortieth of the cost beside the overhead.
    """
    mini, columns = layout.mini, layout.num_columns + spec.micro_batch_multiple
    room = layout.lockstep() * _WORTH_A_TRY - tight_bound(mini, spec)
    if mini.fixed_rows is not None or columns > most_columns(mini, spec) or mini.dp_size == 1:
        return layout
    if room <= spec.micro_batch_overhead * spec.micro_batch_multiple:
        return layout
    (more,) = _search_together([mini], columns, spec)
    return more if more is not None and more.value(spec) < layout.value(spec) else layout


def _rules(spec: StepSpec, num_columns: int) -> Rules:
    """Rows change micro-batch within their rank, but where that is fixed."""
    fixed = spec.micro_batch_size_per_gpu is not None or num_columns == 1
    return Rules(cap=spec.cap, moves="none" if fixed else "rank")


def _search_together(minis: list[MiniBatch], num_columns: int, spec: StepSpec) -> list[Layout | None]:
    """Best layout of each mini-batch in ``num_columns`` columns; None where none was found within the cap."""
    # with one column or fixed micro-batches the second start would be the first over again
    alike = num_columns == 1 or spec.micro_batch_size_per_gpu is not None
    kinds = (starts.by_tiers,) if alike else (starts.by_tiers, starts.by_stripes)
    padding = np.stack([mini.padding for mini in minis for _ in kinds]).astype(np.int64)
    boards = Boards(
        np.stack([mini.cost for mini in minis for _ in kinds]),
        np.stack([mini.tokens for mini in minis for _ in kinds]),
        np.stack([start(mini, num_columns) for mini in minis for start in kinds]),
        num_ranks=minis[0].dp_size,
        num_columns=num_columns,
        kind=padding if padding.any() else None,
    )
    rules = _rules(spec, num_columns)
    fits = fit_cap(boards, rules)
    even_out_loads(boards, rules, max_rounds=_ROUNDS_OF_A_START if len(kinds) > 1 else _ROUNDS)
    lockstep = np.where(fits, boards.lockstep(), np.inf).reshape(len(minis), len(kinds))
    best = np.arange(len(minis)) * len(kinds) + lockstep.argmin(axis=1)
    if len(kinds) > 1:
        boards = boards.select(best)
        even_out_loads(boards, rules, max_rounds=_ROUNDS)
    polish(boards, rules, goals=np.array([tight_bound(mini, spec) for mini in minis]))
    layouts = [Layout(mini, num_columns, boards.cell[j]) for j, mini in enumerate(minis)]
    layouts = [_deepened(layout, spec, _DEEP_LOADS // len(layouts)) for layout in layouts]
    return [layout if layout.legal(spec.cap) else None for layout in layouts]


def _small_board(layout: Layout) -> SmallBoard:
    mini = layout.mini
    return SmallBoard(
        cost=mini.cost,
        tokens=mini.tokens,
        kind=mini.padding.astype(np.int64),
        num_ranks=mini.dp_size,
        num_columns=layout.num_columns,
    )


def _deepened(layout: Layout, spec: StepSpec, max_loads: int) -> Layout:
    """A small layout after a harder search; a large one, or one that breaks the cap, as it is."""
    mini = layout.mini
    if mini.cost.size > MAX_ROWS or mini.dp_size == 1 or not layout.legal(spec.cap):
        return layout
    board = _small_board(layout)
    rules = _rules(spec, layout.num_columns)
    cell = deepen(board, layout.cell, rules, goal=tight_bound(mini, spec), max_loads=max_loads)
    return Layout(mini, layout.num_columns, cell)


def _level_ranks(layout: Layout, spec: StepSpec) -> Layout:
    """The layout with rows swapped between ranks until the fullest rank is as low as that makes it."""
    mini = layout.mini
    board = _small_board(layout)
    rules = _rules(spec, layout.num_columns)
    goal = mini_batch_bound(mini.cost, mini.tokens, num_ranks=mini.dp_size, rows_per_rank=int(mini.rows.min()))
    return Layout(mini, layout.num_columns, level_ranks(board, layout.cell, rules, goal=goal))


def _last_resort(mini: MiniBatch, spec: StepSpec) -> Layout | None:
    """The roomiest layout, levelled; None if it cannot be brought under the cap."""
    layout = roomiest(mini, spec)
    boards = Boards(
        mini.cost[None], mini.tokens[None], layout.cell[None], num_ranks=mini.dp_size, num_columns=layout.num_columns
    )
    rules = _rules(spec, layout.num_columns)
    if not fit_cap(boards, rules).all():
        return None
    even_out_loads(boards, rules)
    polish(boards, rules)
    return Layout(mini, layout.num_columns, boards.cell[0])


def _at_least_as_good(layout: Layout, spec: StepSpec) -> Layout:
    """``layout``, or one of the plain rules or the batch as it came where that costs less."""
    rivals: list[Layout | None] = []
    came = starts.as_it_came(layout.mini, spec.min_micro_batches, spec.cap)
    if came.num_columns % spec.micro_batch_multiple == 0 and came.legal(spec.cap):
        rivals.append(came)
    if spec.algorithm == "refined":
        below = layout.value(spec) if spec.objective == "lockstep" else np.inf
        rivals += [_by_rule(layout.mini, spec, rule, below=below) for rule in ("kk", "lpt")]
    chosen = [layout, *(rival for rival in rivals if rival is not None)]
    if spec.algorithm == "refined" and spec.objective == "rank":
        chosen += [_level_ranks(each, spec) for each in chosen]
    return min(chosen, key=lambda each: (each.value(spec), each.lockstep()))


def _by_rule(mini: MiniBatch, spec: StepSpec, rule: str, *, below: float = np.inf) -> Layout | None:
    """What ``rule`` alone returns: its layout in the fewest columns in which it fits.

    None if nothing fits, or if its ranks alone show that it costs ``below`` or more.
    """
    rank = starts.rank_by_rule(mini, rule)
    real = rank >= 0
    if sums(rank[real], mini.cost[real], mini.dp_size).max() >= below:
        return None
    for columns in range(fewest_columns(mini, spec), most_columns(mini, spec) + 1, spec.micro_batch_multiple):
        cell = starts.by_ranks(mini, rank, columns, rule, spec.cap)
        if cell is not None and (layout := Layout(mini, columns, cell)).legal(spec.cap):
            return layout
    return _last_resort(mini, spec)
