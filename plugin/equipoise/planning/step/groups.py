"""Groups that are kept whole, on one rank or in one micro-batch.

First, whole groups are assigned to ranks, by cost and so that each rank gets its number of rows. Then the search fills
the micro-batches: rows move only within their rank, or groups move as if they were rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, int_sums, iota, sums
from equipoise.planning.partition import karmarkar_karp
from equipoise.planning.partition.shares import level_shares, share_out
from equipoise.planning.step.composition import mini_batch_rows
from equipoise.planning.step.errors import check_group_tokens, no_shares
from equipoise.planning.step.layout import MiniBatch, mini_batches
from equipoise.planning.step.pieces import Pieces
from equipoise.planning.step.spec import StepSpec

_MORE_BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of padding, tried for the remedy in an error


def kept_whole(
    minis: list[MiniBatch],
    members: list[IntArray],
    tokens: IntArray,
    padding: BoolArray,
    group: IntArray,
    spec: StepSpec,
) -> list[list[Pieces]]:
    """The pieces of each mini-batch, once per assignment of its groups to ranks; the most even one first.

    ``members`` are the row ids of each mini-batch; ``tokens``, ``padding`` and ``group`` cover all rows, shape (n,).

    Raises:
        InfeasiblePlan: groups do not add up to the rows of each rank, or a group is above the cap.
    """
    grouped = [_Grouped.of(mini, group[rows]) for mini, rows in zip(minis, members, strict=True)]
    for j, one in enumerate(grouped):
        if spec.keep_groups == "micro":
            check_group_tokens(one.tokens[one.real], one.size[one.real], j, spec)
    shares = [_shares(one, spec) for one in grouped]
    for j, (one, found) in enumerate(zip(grouped, shares, strict=True)):
        if not found:
            on_ranks = dataclasses.replace(spec, keep_groups="rank")
            loose = spec.keep_groups == "micro" and all(_shares(each, on_ranks) for each in grouped)
            padded = _padded_rows(tokens, padding, group, spec)
            room, value = one.room(spec), "rank" if loose else "none"
            raise no_shares(one.size[one.real], room, j, spec, padded=padded, loose=value)
    return [[_pieces(one, part, spec) for part in found] for one, found in zip(grouped, shares, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Grouped:
    """The G groups of one mini-batch's n rows; each padding row is its own group.

    ``of_row`` is the group of each row, shape (n,). The others describe groups, shape (G,); ``size`` counts rows.
    """

    mini: MiniBatch
    of_row: IntArray
    size: IntArray
    cost: FloatArray
    tokens: IntArray
    padding: BoolArray

    @classmethod
    def of(cls, mini: MiniBatch, group: IntArray) -> _Grouped:
        """Groups of a mini-batch, given the group of each row, shape (n,)."""
        own = np.where(mini.padding, int(group.max()) + 1 + np.cumsum(mini.padding), group)
        names, found = np.unique(own, return_inverse=True)
        of_row: IntArray = found.astype(np.int64)
        return cls(
            mini=mini,
            of_row=of_row,
            size=counts(of_row, names.size),
            cost=sums(of_row, mini.cost, names.size),
            tokens=int_sums(of_row, mini.tokens, names.size),
            padding=counts(of_row[mini.padding], names.size) > 0,
        )

    @property
    def real(self) -> IntArray:
        """Groups other than padding."""
        return np.flatnonzero(~self.padding)

    def room(self, spec: StepSpec) -> IntArray:
        """Rows of each bin for whole groups: ranks, or micro-batches if those have a fixed number of rows."""
        fixed = self.mini.fixed_rows
        if spec.keep_groups == "micro" and fixed is not None:
            return np.full(self.mini.cost.size // fixed, fixed)
        return self.mini.rows


def _padded_rows(tokens: IntArray, padding: BoolArray, group: IntArray, spec: StepSpec) -> int | None:
    """Size of a batch, padded at its end, whose whole groups fit on the ranks; None if none was found."""
    unit = spec.dp_size * spec.num_mini_batches * (spec.micro_batch_size_per_gpu or 1) * spec.micro_batch_multiple
    for blocks in _MORE_BLOCKS:
        n = (tokens.size // unit + blocks) * unit
        none = np.zeros(n - tokens.size, dtype=np.int64)
        lengths, flags, groups = np.append(tokens, none), np.append(padding, none == 0), np.append(group, none)
        members = mini_batch_rows(lengths, flags, spec)
        minis = mini_batches(members, np.ones(n), lengths, flags, spec)
        grouped = [_Grouped.of(mini, groups[rows]) for mini, rows in zip(minis, members, strict=True)]
        if all(share_out(one.size[one.real], one.cost[one.real], one.room(spec)) is not None for one in grouped):
            return n
    return None


def _shares(grouped: _Grouped, spec: StepSpec) -> list[IntArray]:
    """Assignments of the real groups to bins that were found, by a plain rule or by several and a search."""
    size, cost, room = grouped.size[grouped.real], grouped.cost[grouped.real], grouped.room(spec)
    if not size.size:
        return [size]
    found: list[IntArray | None] = []
    even = size.size % room.size == 0 and (size == size[0]).all()
    if spec.algorithm != "lpt" and even and size.size // room.size * size[0] <= room.min():
        found.append(karmarkar_karp.equal_size(cost, room.size))
    if spec.algorithm == "refined" or not found:
        found.append(share_out(size, cost, room))
    shares = [part for part in found if part is not None]
    if spec.algorithm == "refined":
        shares += [level_shares(part, size, cost, room) for part in shares]
    shares.sort(key=lambda part: float(sums(part, cost, room.size).max()))
    unlike: dict[bytes, IntArray] = {part.tobytes(): part for part in reversed(shares)}
    return list(reversed(unlike.values()))


def _pieces(grouped: _Grouped, part: IntArray, spec: StepSpec) -> Pieces:
    """What the search lays out once groups have bins: rows with a home, groups with a home, or groups in cells."""
    mini, size, ranks = grouped.mini, grouped.size, grouped.mini.dp_size
    if spec.keep_groups == "micro" and mini.fixed_rows is not None:
        return _in_cells(grouped, part, spec)
    home = np.full(size.size, -1, dtype=np.int64)
    home[grouped.real] = part
    real_rows = int_sums(part, size[grouped.real], ranks)
    if spec.keep_groups == "rank":
        board, home = dataclasses.replace(mini, real_rows=real_rows), home[grouped.of_row]
        kind = np.where(mini.padding, ranks, home)  # rows stay on their rank
    else:
        real = counts(part, ranks)
        board = _as_board(grouped, rows=real + mini.rows - real_rows, real_rows=real)
        kind = np.where(grouped.padding, 0, size)
    return Pieces(mini=mini, board=board, kind=kind, tied=grouped.of_row, home=home)


def _in_cells(grouped: _Grouped, part: IntArray, spec: StepSpec) -> Pieces:
    """Groups in micro-batches of fixed size: the most expensive micro-batches form the first column, and so on."""
    mini, room = grouped.mini, grouped.room(spec)
    bins = np.full(grouped.size.size, -1, dtype=np.int64)
    bins[grouped.real] = part
    empty = room - int_sums(part, grouped.size[grouped.real], room.size)
    bins[np.flatnonzero(grouped.padding)] = np.repeat(iota(room.size), empty)
    place = np.empty(room.size, dtype=np.int64)
    place[np.argsort(-sums(bins, grouped.cost, room.size), kind="stable")] = iota(room.size)
    board = _as_board(grouped, rows=mini.rows, real_rows=mini.real_rows)
    kind = np.where(grouped.padding, 0, grouped.size)
    return Pieces(mini=mini, board=board, kind=kind, tied=grouped.of_row, cell=place[bins])


def _as_board(grouped: _Grouped, *, rows: IntArray, real_rows: IntArray) -> MiniBatch:
    """The groups, as if they were rows of a mini-batch."""
    return dataclasses.replace(
        grouped.mini,
        cost=grouped.cost,
        tokens=grouped.tokens,
        padding=grouped.padding,
        rows=rows,
        real_rows=real_rows,
    )
