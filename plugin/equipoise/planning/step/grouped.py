"""Layouts that keep groups whole: on one rank, or in one micro-batch.

Whole groups are shared out among ranks first, by cost and with exactly the rows that each rank takes. Then the search
of :mod:`equipoise.planning.partition` fills the micro-batches: rows change micro-batch on their rank only, or groups
take the place of rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from equipoise._arrays import BoolArray, IntArray, counts, int_sums, iota, sums
from equipoise.errors import InvalidInput, must
from equipoise.planning.partition import karmarkar_karp
from equipoise.planning.partition.board import Boards, Rules
from equipoise.planning.partition.deepen import MAX_ROWS, SmallBoard, deepen
from equipoise.planning.partition.refine import even_out_loads, fit_cap, polish
from equipoise.planning.partition.shares import level_shares, share_out
from equipoise.planning.step import starts
from equipoise.planning.step.composition import mini_batch_rows
from equipoise.planning.step.errors import check_group_tokens, no_columns, no_shares
from equipoise.planning.step.layout import Layout, MiniBatch
from equipoise.planning.step.limits import fewest_columns, most_columns
from equipoise.planning.step.spec import StepSpec

_MORE_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of padding, tried for the text of an error
_DEEP_LOADS = 12_000_000  # of all small mini-batches together: some 0.1 s


def group_numbers(group_ids: Any, n: int) -> IntArray:
    """Groups numbered in the order in which they arrive, shape (n,); ids may be anything hashable.

    Raises:
        InvalidInput: not one id for each row, or an id that cannot be hashed.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Units:
    """The groups of one mini-batch, a padding row being one of its own.

    Attributes:
        mini: the rows.
        of_row: unit of each row, shape (n,).
        size: rows of each unit, shape (U,).
        board: the units as rows of a mini-batch; ``rows`` and ``real_rows`` still count rows, not units.

    """

    mini: MiniBatch
    of_row: IntArray
    size: IntArray
    board: MiniBatch

    @classmethod
    def of(cls, mini: MiniBatch, group: IntArray) -> Units:
        """Units of a mini-batch whose rows are of these groups, shape (n,)."""
        own = np.where(mini.padding, int(group.max()) + 1 + np.cumsum(mini.padding), group)
        names, of_row = np.unique(own, return_inverse=True)
        of_row = of_row.astype(np.int64)
        padding: BoolArray = counts(of_row[mini.padding], names.size) > 0
        board = dataclasses.replace(
            mini,
            cost=sums(of_row, mini.cost, names.size),
            tokens=int_sums(of_row, mini.tokens, names.size),
            padding=padding,
            fixed_rows=None,
        )
        return cls(mini=mini, of_row=of_row, size=counts(of_row, names.size), board=board)

    @property
    def real(self) -> IntArray:
        """Units that are no padding."""
        return np.flatnonzero(~self.board.padding)

    def room(self, spec: StepSpec) -> IntArray:
        """Rows of each bin that takes whole units: ranks, or micro-batches where those have fixed rows."""
        if spec.keep_groups == "micro" and self.mini.fixed_rows is not None:
            return np.full(self.mini.cost.size // self.mini.fixed_rows, self.mini.fixed_rows)
        return self.mini.rows


def search_grouped(
    minis: list[MiniBatch], members: list[IntArray], tokens: IntArray, group: IntArray, spec: StepSpec
) -> list[Layout]:
    """A layout of each mini-batch that keeps its groups whole.

    Args:
        minis: the mini-batches.
        members: row ids of each.
        tokens: of all rows, shape (n,).
        group: number of each row's group, shape (n,).
        spec: the settings; ``keep_groups`` is not "none".

    Raises:
        InfeasiblePlan: groups do not add up to the rows of each rank, or do not fit under the cap.

    """
    units = [Units.of(mini, group[rows]) for mini, rows in zip(minis, members, strict=True)]
    for j, one in enumerate(units):
        if spec.keep_groups == "micro":
            check_group_tokens(one.board.tokens[one.real], one.size[one.real], j, spec)
    shares = [_shares(one, spec) for one in units]
    for j, (one, found) in enumerate(zip(units, shares, strict=True)):
        if not found:
            on_ranks = dataclasses.replace(spec, keep_groups="rank")
            loose = "rank" if spec.keep_groups == "micro" and all(_shares(each, on_ranks) for each in units) else "none"
            padding = np.zeros(tokens.size, dtype=np.bool_)
            for mini, rows in zip(minis, members, strict=True):
                padding[rows] = mini.padding
            padded = _padded_rows(tokens, padding, group, spec)
            raise no_shares(one.size[one.real], one.room(spec), j, spec, padded=padded, loose=loose)
    return [_best(one, found, j, spec, len(minis)) for j, (one, found) in enumerate(zip(units, shares, strict=True))]


def _padded_rows(tokens: IntArray, padding: BoolArray, group: IntArray, spec: StepSpec) -> int | None:
    """Rows of the batch, with padding at its end, for which whole groups find their ranks; None if none was found."""
    unit = spec.dp_size * spec.num_mini_batches * (spec.micro_batch_size_per_gpu or 1) * spec.micro_batch_multiple
    for blocks in _MORE_BLOCKS:
        n = (tokens.size // unit + blocks) * unit
        more = n - tokens.size
        flags = np.append(padding, np.ones(more, dtype=np.bool_))
        groups = np.append(group, np.zeros(more, dtype=np.int64))
        members = mini_batch_rows(np.append(tokens, np.zeros(more, dtype=np.int64)), flags, spec)
        for rows in members:
            mini = MiniBatch(
                cost=np.zeros(rows.size),
                tokens=np.zeros(rows.size, dtype=np.int64),
                padding=flags[rows],
                rows=np.full(spec.dp_size, rows.size // spec.dp_size),
                real_rows=np.zeros(spec.dp_size, dtype=np.int64),
                fixed_rows=spec.micro_batch_size_per_gpu,
            )
            one = Units.of(mini, groups[rows])
            size = one.size[one.real]
            if share_out(size, one.board.cost[one.real], one.room(spec), by="size") is None:
                break
        else:
            return n
    return None


def _shares(units: Units, spec: StepSpec) -> list[IntArray]:
    """Bins of the units that are no padding: by a plain rule, or by several and levelled; those that were found."""
    size, cost, room = units.size[units.real], units.board.cost[units.real], units.room(spec)
    if not size.size:
        return [np.empty(0, dtype=np.int64)]
    found: list[IntArray | None] = []
    alike = bool(
        (size == size[0]).all() and size.size % room.size == 0 and size.size // room.size * size[0] <= room.min()
    )
    if spec.algorithm != "lpt" and alike:
        found.append(karmarkar_karp.equal_size(cost, room.size))
    if spec.algorithm == "refined" or not found:
        by = ("cost", "size") if spec.algorithm == "refined" else ("cost",)
        found += [share_out(size, cost, room, by=rule) for rule in by]
    shares = [part for part in found if part is not None]
    if spec.algorithm == "refined":
        shares += [level_shares(part, size, cost, room) for part in shares]
    shares.sort(key=lambda part: float(sums(part, cost, room.size).max()))
    unlike: dict[bytes, IntArray] = {part.tobytes(): part for part in reversed(shares)}
    return list(reversed(unlike.values()))


def _best(units: Units, shares: list[IntArray], j: int, spec: StepSpec, num_minis: int) -> Layout:
    """The best layout over the shares, and the batch as it came where that keeps its groups and costs less."""
    found: list[Layout | None] = []
    if spec.keep_groups == "micro" and units.mini.fixed_rows is not None:
        found += [_fixed_cells(units, part, spec) for part in shares]
    else:
        found += [_by_rule(units, part, spec) for part in shares]
        if spec.algorithm == "refined":
            best = next((part for part, layout in zip(shares, found, strict=True) if layout is not None), shares[0])
            found.append(_searched(units, best, spec, _DEEP_LOADS // num_minis))
    came = starts.as_it_came(units.mini, spec.min_micro_batches, spec.cap)
    if came.num_columns % spec.micro_batch_multiple == 0 and came.legal(spec.cap) and _whole(came, units, spec):
        found.append(came)
    layouts = [layout for layout in found if layout is not None]
    if not layouts:
        raise no_columns(units.size[units.real], j, spec)
    return min(layouts, key=lambda layout: (layout.value(spec), layout.lockstep()))


def _whole(layout: Layout, units: Units, spec: StepSpec) -> bool:
    place = layout.cell if spec.keep_groups == "micro" else layout.cell % layout.mini.dp_size
    first = np.empty(units.size.size, dtype=np.int64)
    first[units.of_row] = place
    return bool((first[units.of_row] == place).all())


def _on_ranks(units: Units, part: IntArray, spec: StepSpec) -> tuple[MiniBatch, IntArray]:
    """What is laid out on the ranks, rows or units, and the rank of each; -1 for padding."""
    mini, size = units.mini, units.size
    rank = np.full(size.size, -1, dtype=np.int64)
    rank[units.real] = part
    real_rows = int_sums(part, size[units.real], mini.dp_size)
    if spec.keep_groups == "rank":
        return dataclasses.replace(mini, real_rows=real_rows), rank[units.of_row]
    real_units = counts(part, mini.dp_size)
    board = dataclasses.replace(units.board, rows=real_units + mini.rows - real_rows, real_rows=real_units)
    return board, rank


def _as_rows(layout: Layout, units: Units, spec: StepSpec) -> Layout:
    """The layout of rows that a layout of units, or of rows, stands for."""
    cell = layout.cell[units.of_row] if spec.keep_groups == "micro" else layout.cell
    return Layout(units.mini, layout.num_columns, cell)


def _by_rule(units: Units, part: IntArray, spec: StepSpec) -> Layout | None:
    """Each rank's micro-batches by a plain rule, in the fewest in which they fit."""
    mini, rank = _on_ranks(units, part, spec)
    rule = "lpt" if spec.algorithm == "refined" else spec.algorithm
    most = most_columns(mini, spec)
    for columns in range(fewest_columns(mini, spec), most + 1, spec.micro_batch_multiple):
        cell = starts.by_ranks(mini, rank, columns, rule, spec.cap)
        if cell is not None and (layout := Layout(mini, columns, cell)).legal(spec.cap):
            return _as_rows(layout, units, spec)
    if most < max(fewest_columns(mini, spec), 1):
        return None
    layout = _levelled(mini, [starts.fold_of_ranks(mini, rank, most)], units, spec)
    return None if layout is None else _as_rows(layout, units, spec)


def _searched(units: Units, part: IntArray, spec: StepSpec, max_loads: int) -> Layout | None:
    """The best layout that the search finds from several starts, in the fewest micro-batches that work."""
    mini, rank = _on_ranks(units, part, spec)
    for columns in range(fewest_columns(mini, spec), most_columns(mini, spec) + 1, spec.micro_batch_multiple):
        cells = [starts.tiers_of_ranks(mini, rank, columns), starts.by_ranks(mini, rank, columns, "lpt", None)]
        layout = _levelled(mini, [cell for cell in cells if cell is not None], units, spec)
        if layout is not None:
            return _as_rows(_deepened(layout, units, spec, max_loads), units, spec)
    return None


def _kind(mini: MiniBatch, cell: IntArray, units: Units, spec: StepSpec) -> IntArray:
    """Rows stay on their rank; units change ranks for units of as many rows, padding for padding."""
    if spec.keep_groups == "rank":
        return cell % mini.dp_size
    return np.where(mini.padding, 0, units.size)


def _rules(mini: MiniBatch, columns: int, spec: StepSpec) -> Rules:
    return Rules(cap=spec.cap, moves="none" if columns == 1 or mini.fixed_rows is not None else "rank")


def _levelled(mini: MiniBatch, cells: list[IntArray], units: Units, spec: StepSpec) -> Layout | None:
    """The best of these starts after the search; None if none comes under the cap."""
    columns = int(max(cell.max() for cell in cells)) // mini.dp_size + 1
    boards = Boards(
        np.stack([mini.cost] * len(cells)),
        np.stack([mini.tokens] * len(cells)),
        np.stack(cells),
        num_ranks=mini.dp_size,
        num_columns=columns,
        kind=np.stack([_kind(mini, cell, units, spec) for cell in cells]),
    )
    rules = _rules(mini, columns, spec)
    fit_cap(boards, rules)
    even_out_loads(boards, rules)
    polish(boards, rules)
    layouts = [Layout(mini, columns, cell) for cell in [*boards.cell, *cells]]
    legal = [layout for layout in layouts if layout.legal(spec.cap)]
    return min(legal, key=Layout.lockstep, default=None)


def _deepened(layout: Layout, units: Units, spec: StepSpec, max_loads: int) -> Layout:
    """A small layout after a harder search."""
    mini = layout.mini
    if mini.cost.size > MAX_ROWS or mini.dp_size == 1:
        return layout
    board = SmallBoard(
        cost=mini.cost,
        tokens=mini.tokens,
        kind=_kind(mini, layout.cell, units, spec),
        num_ranks=mini.dp_size,
        num_columns=layout.num_columns,
    )
    goal = max(float(mini.cost.sum()) / mini.dp_size, float(mini.cost.max()))
    rules = _rules(mini, layout.num_columns, spec)
    return Layout(mini, layout.num_columns, deepen(board, layout.cell, rules, goal=goal, max_loads=max_loads))


def _fixed_cells(units: Units, part: IntArray, spec: StepSpec) -> Layout:
    """Micro-batches of fixed rows, given the units of each: the dearest ones meet in the first column, and so on."""
    mini, room = units.mini, units.room(spec)
    bins = np.full(units.size.size, -1, dtype=np.int64)
    bins[units.real] = part
    empty = room - int_sums(part, units.size[units.real], room.size)
    bins[np.flatnonzero(units.board.padding)] = np.repeat(iota(room.size), empty)
    place = np.empty(room.size, dtype=np.int64)
    place[np.argsort(-sums(bins, units.board.cost, room.size), kind="stable")] = iota(room.size)
    return _polished_cells(Layout(mini, room.size // mini.dp_size, place[bins][units.of_row]), units, spec)


def _polished_cells(layout: Layout, units: Units, spec: StepSpec) -> Layout:
    """The layout after swaps of units with as many rows between any two micro-batches."""
    mini, board = layout.mini, units.board
    if spec.algorithm != "refined":
        return layout
    cell = np.empty(units.size.size, dtype=np.int64)
    cell[units.of_row] = layout.cell
    boards = Boards(
        board.cost[None],
        board.tokens[None],
        cell[None],
        num_ranks=mini.dp_size,
        num_columns=layout.num_columns,
        kind=np.where(board.padding, 0, units.size)[None],
    )
    rules = Rules(moves="none", alike=True)
    even_out_loads(boards, rules)
    polish(boards, rules)
    better = Layout(mini, layout.num_columns, boards.cell[0][units.of_row])
    return min(layout, better, key=Layout.lockstep)
