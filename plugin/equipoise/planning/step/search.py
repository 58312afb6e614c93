"""The search for layouts: few micro-batches first, several starts for each, and never worse than a plain rule.

What is laid out, and which changes are allowed, is told by :class:`equipoise.planning.step.pieces.Pieces`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equipoise._arrays import IntArray, iota, sums
from equipoise.planning.partition.pack import round_up
from equipoise.planning.partition.ranks import level_ranks
from equipoise.planning.partition.refine import even_out_loads, fit_cap, kick, polish
from equipoise.planning.step import starts, tiers
from equipoise.planning.step.layout import Layout
from equipoise.planning.step.limits import fewest_columns, most_columns
from equipoise.planning.step.pieces import Pieces, boards_of
from equipoise.planning.step.spec import StepSpec

_ROUNDS_OF_A_START, _ROUNDS = 6, 12  # of pairwise changes: on every start, then on the best
_EXACT_SWAPS = 8_000_000  # looked at by exact steps on all mini-batches of 2048 rows together: some 40 ms
_KICKS = 40  # of all small mini-batches together


def search(candidates: list[list[Pieces]], spec: StepSpec) -> list[Layout | None]:
    """The best layout found for each mini-batch, or None; of several ways to share out its groups, the best."""
    found: list[Layout | None] = [None] * len(candidates)
    if spec.algorithm == "refined":
        found = _refined(candidates, spec)
    return [_at_least_as_good(layout, pieces, spec) for layout, pieces in zip(found, candidates, strict=True)]


def _at_least_as_good(layout: Layout | None, candidates: list[Pieces], spec: StepSpec) -> Layout | None:
    """``layout``, or the batch as it came or what a plain rule makes of it, where that costs less."""
    chosen = [] if layout is None else [layout]
    came = starts.as_it_came(candidates[0].mini, spec.min_micro_batches, spec.cap)
    if candidates[0].allow(came, spec):
        chosen.append(came)
    below = layout.value(spec) if layout is not None and spec.objective == "lockstep" else np.inf
    for pieces in candidates:
        chosen += _by_rules(pieces, spec, below=below, sure=layout is None)
    if spec.algorithm == "refined" and spec.objective == "rank":
        chosen += [_level_ranks(each, candidates[0], spec) for each in chosen]
    return min(chosen, key=lambda each: (each.value(spec), each.lockstep()), default=None)


def _by_rules(pieces: Pieces, spec: StepSpec, *, below: float, sure: bool) -> list[Layout]:
    """What each rule alone returns, but where its ranks alone show that it costs ``below`` or more.

    Where a rule finds nothing, or nothing was found before it, the roomiest layout stands in.
    """
    if pieces.cell is not None:
        return [pieces.layout(fewest_columns(pieces.board, spec), pieces.cell)]
    found: list[Layout | None] = []
    for rule in ("kk", "lpt") if spec.algorithm == "refined" else (spec.algorithm,):
        rank = starts.rank_by_rule(pieces.board, rule) if pieces.home is None else pieces.home
        real = rank >= 0
        if sums(rank[real], pieces.board.cost[real], pieces.mini.dp_size).max() >= below:
            continue
        found.append(_by_rule(pieces, rank, rule, spec))
    if None in found or (sure and spec.algorithm == "refined"):
        found.append(_roomiest(pieces, spec))
    return [layout for layout in found if layout is not None]


def _by_rule(pieces: Pieces, rank: IntArray, rule: str, spec: StepSpec) -> Layout | None:
    """Each rank's micro-batches by a plain rule, in the fewest in which they fit; None if they fit in none."""
    columns, most = fewest_columns(pieces.board, spec), most_columns(pieces.board, spec)
    while columns <= most:
        cell = starts.by_ranks(pieces.board, rank, columns, rule, spec.cap)
        if cell is not None and (layout := pieces.layout(columns, cell)).legal(spec.cap):
            return layout
        # padded rows may need many times the fewest, so that these grow by an eighth at a time
        grown = columns + (spec.micro_batch_multiple if pieces.mini.padded is None else max(1, columns // 8))
        columns = most if columns < most < grown else round_up(grown, spec.micro_batch_multiple)
    return None


def _roomiest(pieces: Pieces, spec: StepSpec) -> Layout | None:
    """The layout in the most micro-batches whose fullest one holds as little as can be, levelled; None if too much."""
    if pieces.mini.padded is not None:
        return tiers.by_tiers(pieces.mini, spec)
    columns = most_columns(pieces.board, spec)
    if columns < max(fewest_columns(pieces.board, spec), 1):
        return None
    boards = boards_of([pieces], [[starts.by_fold(pieces.board, columns, pieces.home)]], columns)
    rules = pieces.rules(columns, spec)
    if not fit_cap(boards, rules).all():
        return None
    even_out_loads(boards, rules)
    polish(boards, rules)
    layout = pieces.layout(columns, boards.cell[0])
    return layout if layout.legal(spec.cap) else None


def _refined(candidates: list[list[Pieces]], spec: StepSpec) -> list[Layout | None]:
    """Search in the fewest columns that may work, then in more of them for those that do not fit.

    Mini-batches of one shape are searched together, in much the same time for any batch up to 2048 rows, and beyond in
    time that grows with the square root of the rows.
    """
    if candidates[0][0].mini.padded is not None:
        return [tiers.searched(pieces[0].mini, spec, len(candidates)) for pieces in candidates]
    rows = sum(pieces[0].mini.cost.size for pieces in candidates)
    max_swaps = int(_EXACT_SWAPS * max(1.0, rows / 2048) ** 0.5) // len(candidates)
    num_kicks = _KICKS // len(candidates)
    found: list[Layout | None] = [None] * len(candidates)
    waiting = {j: _attempts(pieces, spec) for j, pieces in enumerate(candidates)}
    while waiting:
        shapes: dict[tuple[int, int], dict[int, Pieces]] = {}
        for j in list(waiting):
            pieces, num_columns = next(waiting[j], (None, 0))
            if pieces is None:
                del waiting[j]
            else:
                shapes.setdefault((num_columns, pieces.board.cost.size), {})[j] = pieces
        for (num_columns, _), alike in shapes.items():
            layouts = _search_together(list(alike.values()), num_columns, spec, max_swaps, num_kicks)
            for j, layout in zip(alike, layouts, strict=True):
                if layout is not None:
                    found[j] = layout
                    del waiting[j]
    return found


def _attempts(candidates: list[Pieces], spec: StepSpec) -> Iterator[tuple[Pieces, int]]:
    """Pieces and a number of columns to try, until one succeeds."""
    for pieces in candidates:
        least, most = fewest_columns(pieces.board, spec), most_columns(pieces.board, spec)
        for num_columns in range(least, most + 1, spec.micro_batch_multiple):
            yield pieces, num_columns


def _search_together(
    pieces: list[Pieces], num_columns: int, spec: StepSpec, max_swaps: int, num_kicks: int
) -> list[Layout | None]:
    """Best layout of each mini-batch in ``num_columns`` columns; None where none was found within the cap."""
    rules = pieces[0].rules(num_columns, spec)
    cells = [starts.portfolio(one.board, num_columns, one.home, one.cell) for one in pieces]
    num_starts = len(cells[0])
    boards = boards_of(pieces, cells, num_columns)
    fits = fit_cap(boards, rules)
    even_out_loads(boards, rules, max_rounds=_ROUNDS_OF_A_START + (_ROUNDS if num_starts == 1 else 0))
    lockstep = np.where(fits, boards.lockstep(), np.inf).reshape(len(pieces), num_starts)
    best: IntArray = iota(len(pieces)) * num_starts + lockstep.argmin(axis=1)
    going: list[int] = np.flatnonzero(fits[best]).tolist()
    layouts: list[Layout | None] = [None] * len(pieces)
    if not going:
        return layouts
    boards = boards.select(best[going])
    if num_starts > 1:
        even_out_loads(boards, rules, max_rounds=_ROUNDS)
    goals = np.array([pieces[j].goal(spec) for j in going])
    polish(boards, rules, goals=goals, max_swaps=max_swaps)
    kick(boards, rules, goals=goals, num_kicks=num_kicks)
    for at, j in enumerate(going):
        layout = pieces[j].layout(num_columns, boards.cell[at])
        layouts[j] = layout if layout.legal(spec.cap) else None
    return layouts


def _level_ranks(layout: Layout, pieces: Pieces, spec: StepSpec) -> Layout:
    """The layout with rows swapped between ranks until the fullest rank is as low as that makes it."""
    if pieces.tied is not None or pieces.mini.padded is not None or pieces.mini.dp_size == 1:
        return layout
    boards = boards_of([pieces], [[layout.cell]], layout.num_columns)
    level_ranks(boards, spec.cap, goal=pieces.mini.bound(None))
    return pieces.layout(layout.num_columns, boards.cell[0])
