"""The search for layouts: fewest micro-batches first, and never worse than a plain rule.

:class:`equipoise.planning.step.pieces.Pieces` defines what is laid out and which changes are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equipoise._arrays import IntArray, sums
from equipoise.planning.partition.pack import round_up
from equipoise.planning.partition.ranks import level_ranks
from equipoise.planning.partition.refine import even_out_loads, fit_cap, kick, polish
from equipoise.planning.step import starts, tiers
from equipoise.planning.step.layout import Layout
from equipoise.planning.step.limits import fewest_columns, most_columns
from equipoise.planning.step.pieces import Pieces, boards_of
from equipoise.planning.step.spec import StepSpec

_ROUNDS = 36  # of pairwise changes
_EXACT_SWAPS = 8_000_000  # evaluated by exact steps for a batch of 2048 rows: about 40 ms
_KICKS = 40  # for all small mini-batches together


def search(candidates: list[list[Pieces]], spec: StepSpec) -> list[Layout | None]:
    """The best layout found for each mini-batch over its candidates, or None."""
    found: list[Layout | None] = [None] * len(candidates)
    if spec.algorithm == "refined":
        found = _refined(candidates, spec)
    return [_at_least_as_good(layout, pieces, spec) for layout, pieces in zip(found, candidates, strict=True)]


def _at_least_as_good(layout: Layout | None, candidates: list[Pieces], spec: StepSpec) -> Layout | None:
    """``layout``, or the incoming order or the result of a plain rule if that costs less."""
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
    """The layout of each plain rule, skipping those whose ranks already cost ``below`` or more.

    The roomiest layout is added if a rule finds nothing, or if the search found nothing (``sure``).
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
    """Each rank's micro-batches by a plain rule, as few as fit under the cap; None if no number fits."""
    columns, most = fewest_columns(pieces.board, spec), most_columns(pieces.board, spec)
    while columns <= most:
        cell = starts.by_ranks(pieces.board, rank, columns, rule, spec.cap)
        if cell is not None and (layout := pieces.layout(columns, cell)).legal(spec.cap):
            return layout
        # padded rows may need many times the fewest, so grow by an eighth
        grown = columns + (spec.micro_batch_multiple if pieces.mini.padded is None else max(1, columns // 8))
        columns = most if columns < most < grown else round_up(grown, spec.micro_batch_multiple)
    return None


def _roomiest(pieces: Pieces, spec: StepSpec) -> Layout | None:
    """The balanced layout with the most micro-batches and the most room; None if it is above the cap."""
    if pieces.mini.padded is not None:
        return tiers.by_tiers(pieces.mini, spec)
    columns = most_columns(pieces.board, spec)
    if columns < max(fewest_columns(pieces.board, spec), 1):
        return None
    boards = boards_of([pieces], [starts.by_fold(pieces.board, columns, pieces.home)], columns)
    rules = pieces.rules(columns, spec)
    if not fit_cap(boards, rules).all():
        return None
    even_out_loads(boards, rules)
    polish(boards, rules)
    layout = pieces.layout(columns, boards.cell[0])
    return layout if layout.legal(spec.cap) else None


def _refined(candidates: list[list[Pieces]], spec: StepSpec) -> list[Layout | None]:
    """Search in the fewest columns that may work, then in more for the mini-batches that do not fit.

    Mini-batches of one shape are searched together. The budget of exact steps is constant up to 2048 rows in the batch
    and then grows with the square root of the rows.
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
    """Pieces and numbers of columns to try, until one succeeds."""
    for pieces in candidates:
        least, most = fewest_columns(pieces.board, spec), most_columns(pieces.board, spec)
        for num_columns in range(least, most + 1, spec.micro_batch_multiple):
            yield pieces, num_columns


def _search_together(
    pieces: list[Pieces], num_columns: int, spec: StepSpec, max_swaps: int, num_kicks: int
) -> list[Layout | None]:
    """Best layout of each mini-batch in ``num_columns`` columns; None if none was found under the cap."""
    rules = pieces[0].rules(num_columns, spec)
    cells = [starts.start(one.board, num_columns, one.home) if one.cell is None else one.cell for one in pieces]
    boards = boards_of(pieces, cells, num_columns)
    going: list[int] = np.flatnonzero(fit_cap(boards, rules)).tolist()
    layouts: list[Layout | None] = [None] * len(pieces)
    if not going:
        return layouts
    boards = boards.select(np.array(going))
    even_out_loads(boards, rules, max_rounds=_ROUNDS)
    goals = np.array([pieces[j].goal(spec) for j in going])
    polish(boards, rules, goals=goals, max_swaps=max_swaps)
    kick(boards, rules, goals=goals, num_kicks=num_kicks)
    for at, j in enumerate(going):
        layout = pieces[j].layout(num_columns, boards.cell[at])
        layouts[j] = layout if layout.legal(spec.cap) else None
    return layouts


def _level_ranks(layout: Layout, pieces: Pieces, spec: StepSpec) -> Layout:
    """The layout after swaps of rows that lower the fullest rank."""
    if pieces.tied is not None or pieces.mini.padded is not None or pieces.mini.dp_size == 1:
        return layout
    boards = boards_of([pieces], [layout.cell], layout.num_columns)
    level_ranks(boards, spec.cap, goal=pieces.mini.bound(None))
    return pieces.layout(layout.num_columns, boards.cell[0])
