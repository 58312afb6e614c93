"""The search for layouts: few micro-batches first, several starts for each, and never worse than a plain rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, sums
from equipoise.planning.partition.board import Boards, Rules
from equipoise.planning.partition.bounds import mini_batch_bound
from equipoise.planning.partition.deepen import MAX_ROWS, SmallBoard, deepen
from equipoise.planning.partition.ranks import level_ranks
from equipoise.planning.partition.refine import even_out_loads, fit_cap, polish
from equipoise.planning.step import starts
from equipoise.planning.step.layout import Layout, MiniBatch
from equipoise.planning.step.limits import fewest_columns, most_columns, out_of_room, roomiest
from equipoise.planning.step.spec import StepSpec

_WORTH_A_TRY = 0.975  # of a layout's cost: what is closer to its bound is not searched again with more micro-batches
_NO_HOPE = (1.04, 1.02)  # times that cost: given up after the first and the second rounds of the new search
_ROUNDS_OF_A_START, _ROUNDS = 6, 12  # of pairwise changes: on every start, then on the best
_EXACT_SWAPS = 8_000_000  # looked at by exact steps on all mini-batches of 2048 rows together: some 40 ms
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
    """Lockstep cost that no layout of the mini-batch is below (see :mod:`equipoise.planning.partition.bounds`)."""
    return mini_batch_bound(
        mini.cost, mini.tokens, num_ranks=mini.dp_size, cap=spec.cap, rows_per_rank=int(mini.rows.min())
    )


def _refined(minis: list[MiniBatch], spec: StepSpec) -> list[Layout | None]:
    """Search in the fewest columns that may work, then in more for those that do not fit, or where that pays."""
    found: list[Layout | None] = [None] * len(minis)
    columns = [fewest_columns(mini, spec) for mini in minis]
    effort = _Effort.of(minis)
    waiting = list(range(len(minis)))
    while waiting:
        possible = [j for j in waiting if columns[j] <= most_columns(minis[j], spec)]
        for j in set(waiting) - set(possible):
            found[j] = _last_resort(minis[j], spec)
        waiting = []
        for group in _of_one_shape(minis, columns, possible):
            layouts = _search_together([minis[j] for j in group], columns[group[0]], spec, effort)
            for j, layout in zip(group, layouts, strict=True):
                found[j] = layout
                if layout is None:
                    columns[j] += spec.micro_batch_multiple
                    waiting.append(j)
    more = [0 if layout is None else _columns_worth_a_try(layout, spec) for layout in found]
    for group in _of_one_shape(minis, more, [j for j, count in enumerate(more) if count]):
        rivals = [layout for j in group if (layout := found[j]) is not None]
        below = np.array([layout.value(spec) - spec.micro_batch_overhead * more[group[0]] for layout in rivals])
        layouts = _search_together([minis[j] for j in group], more[group[0]], spec, effort, below=below)
        for j, layout, rival in zip(group, layouts, rivals, strict=True):
            found[j] = layout if layout is not None and layout.value(spec) < rival.value(spec) else rival
    return found


def _of_one_shape(minis: list[MiniBatch], columns: list[int], among: list[int]) -> list[list[int]]:
    """Mini-batches with equal rows and columns, which are searched together."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for j in among:
        shapes.setdefault((columns[j], minis[j].cost.size), []).append(j)
    return list(shapes.values())


def _columns_worth_a_try(layout: Layout, spec: StepSpec) -> int:
    """The next number of micro-batches, or 0 where it could not pay.

    It could where the bound leaves room for it: a fortieth of the cost beside the overhead.
    """
    mini, columns = layout.mini, layout.num_columns + spec.micro_batch_multiple
    if mini.fixed_rows is not None or columns > most_columns(mini, spec) or mini.dp_size == 1:
        return 0
    room = layout.lockstep() * _WORTH_A_TRY - tight_bound(mini, spec)
    return columns if room > spec.micro_batch_overhead * spec.micro_batch_multiple else 0


def _rules(spec: StepSpec, num_columns: int) -> Rules:
    """Rows change micro-batch within their rank, but where that is fixed."""
    fixed = spec.micro_batch_size_per_gpu is not None or num_columns == 1
    return Rules(cap=spec.cap, moves="none" if fixed else "rank")


@dataclass(frozen=True, kw_only=True)
class _Effort:
    """What the search of each mini-batch may spend.

    Attributes:
        swaps: looked at by exact steps.
        loads: looked at by the harder search of a small mini-batch.

    """

    swaps: int
    loads: int

    @classmethod
    def of(cls, minis: list[MiniBatch]) -> _Effort:
        """Much the same time for any batch up to 2048 rows, then by the square root of the rows."""
        rows = sum(mini.cost.size for mini in minis)
        swaps = int(_EXACT_SWAPS * max(1.0, rows / 2048) ** 0.5)
        return cls(swaps=swaps // len(minis), loads=_DEEP_LOADS // len(minis))


def _search_together(
    minis: list[MiniBatch], num_columns: int, spec: StepSpec, effort: _Effort, *, below: FloatArray | None = None
) -> list[Layout | None]:
    """Best layout of each mini-batch in ``num_columns`` columns.

    None where none was found within the cap, or where it will hardly be found to cost less than ``below``.
    """
    rules = _rules(spec, num_columns)
    boards, alive = _best_starts(minis, num_columns, spec)
    if below is not None:
        alive &= boards.lockstep() < below * _NO_HOPE[0]
    layouts: list[Layout | None] = [None] * len(minis)
    going: IntArray = np.flatnonzero(alive)
    if not going.size:
        return layouts
    boards = boards.select(going)
    if num_columns > 1 and spec.micro_batch_size_per_gpu is None:
        even_out_loads(boards, rules, max_rounds=_ROUNDS)
    if below is not None:
        hopeful: IntArray = np.flatnonzero(boards.lockstep() < below[going] * _NO_HOPE[1])
        if not hopeful.size:
            return layouts
        going, boards = going[hopeful], boards.select(hopeful)
    remaining: list[int] = going.tolist()
    goals = np.array([tight_bound(minis[j], spec) for j in remaining])
    polish(boards, rules, goals=goals, max_swaps=effort.swaps)
    for at, j in enumerate(remaining):
        layout = _deepened(Layout(minis[j], num_columns, boards.cell[at]), spec, effort.loads)
        layouts[j] = layout if layout.legal(spec.cap) else None
    return layouts


def _best_starts(minis: list[MiniBatch], num_columns: int, spec: StepSpec) -> tuple[Boards, BoolArray]:
    """The better of two starts of each mini-batch, under the cap and levelled; and whether it is under the cap."""
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
    even_out_loads(boards, rules, max_rounds=_ROUNDS + _ROUNDS_OF_A_START if alike else _ROUNDS_OF_A_START)
    lockstep = np.where(fits, boards.lockstep(), np.inf).reshape(len(minis), len(kinds))
    best = np.arange(len(minis)) * len(kinds) + lockstep.argmin(axis=1)
    return boards.select(best), fits[best]


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
