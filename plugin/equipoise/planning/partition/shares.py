"""Whole groups of rows to bins that each take a fixed number of rows, at even cost.

Bin packing with costs: greedy, then moves and swaps of whole groups, then, for few groups, an exhaustive search over
the room left in each bin.
"""

from __future__ import annotations

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, int_sums, iota, sums
from equipoise.planning.partition.board import Boards, Rules
from equipoise.planning.partition.refine import even_out_loads

_MAX_STEPS = 2000
_MAX_PAIRS = 20_000_000  # evaluated in one search: about 0.2 s
_EXACT_GROUPS = 200
_EXACT_NODES = 20_000


def share_out(size: IntArray, cost: FloatArray, room: IntArray) -> IntArray | None:
    """Bin of each group, shape (G,), with no bin over its room; None if no such assignment was found.

    The most expensive group comes first, and goes to the cheapest bin with room. ``size`` is the rows of each group,
    ``room`` the rows that each bin takes, shape (k,); single rows fill what groups leave.

    >>> share_out(np.array([2, 1, 1]), np.array([5.0, 3.0, 1.0]), np.array([2, 2])).tolist()
    [0, 1, 1]
    """
    part = _cheapest_first(size, cost, room)
    _trade(part, size, size.astype(np.float64), room, over=True)
    return _exhaustive(size, room) if (int_sums(part, size, room.size) > room).any() else part


def level_shares(part: IntArray, size: IntArray, cost: FloatArray, room: IntArray) -> IntArray:
    """The shares after swaps and moves of whole groups that lower the most expensive bin; no bin exceeds its room."""
    tokens, bins = np.zeros((1, cost.size), dtype=np.int64), room.size
    boards = Boards(cost[None], tokens, part[None], num_ranks=bins, num_columns=1, kind=size[None])
    before = boards.lockstep_of(0)
    even_out_loads(boards, Rules())
    part = np.array(boards.cell[0] if boards.lockstep_of(0) < before else part)
    _trade(part, size, cost, room, over=False)
    return part


def _trade(part: IntArray, size: IntArray, weight: FloatArray, room: IntArray, *, over: bool) -> None:
    """Swap or move whole groups of the bin with the most ``weight``, in place, while that lowers it.

    With ``over``, bins may exceed their room, and it is that excess which is lowered.
    """
    bins, evaluated = iota(room.size), 0
    spare_weight, spare_size = np.append(weight, 0.0), np.append(size, 0)  # the last one means no group
    for _ in range(_MAX_STEPS):
        rows, load = int_sums(part, size, room.size), sums(part, weight, room.size)
        excess: FloatArray = np.maximum(rows - room, 0).astype(np.float64) if over else load
        top = int(excess.argmax())
        mine, others, elsewhere = np.flatnonzero(part == top), np.flatnonzero(part != top), bins[bins != top]
        partner = np.concatenate([others, np.full(elsewhere.size, part.size, dtype=np.int64)])
        there = np.concatenate([part[others], elsewhere])
        evaluated += mine.size * there.size
        if evaluated > _MAX_PAIRS or not mine.size or not there.size or (over and not excess[top]):
            return
        shift = spare_weight[mine][:, None] - spare_weight[partner]
        grown = size[mine][:, None] - spare_size[partner]
        if over:
            after = np.maximum(excess[top] - grown, 0) + np.maximum(rows[there] + grown - room[there], 0)
            gain: FloatArray = excess[top] + excess[there] - after
        else:
            fits: BoolArray = (rows[there] + grown <= room[there]) & (rows[top] - grown <= room[top]) & (shift > 0)
            gain = np.where(fits, load[top] - np.maximum(load[top] - shift, load[there] + shift), -np.inf)
        a, b = divmod(int(gain.argmax()), there.size)
        if gain[a, b] <= 1e-12 * excess[top]:
            return
        if partner[b] < part.size:
            part[partner[b]] = top
        part[mine[a]] = there[b]


def _cheapest_first(size: IntArray, cost: FloatArray, room: IntArray) -> IntArray:
    """Groups, the most expensive first, to the cheapest bin with room, or else to the bin with the most room."""
    left: IntArray = np.array(room)
    load, part = np.zeros(room.size), np.empty(size.size, dtype=np.int64)
    for group in np.argsort(-cost, kind="stable").tolist():
        fits: BoolArray = left >= size[group]
        part[group] = bin_ = int(np.where(fits, load, np.inf).argmin()) if fits.any() else int(left.argmax())
        left[bin_] -= size[group]
        load[bin_] += cost[group]
    return part


def _exhaustive(size: IntArray, room: IntArray) -> IntArray | None:
    """Depth-first search: the largest group first, into the tightest bin first, then into every other.

    A branch ends when the remaining groups cannot fill the remaining room: a bin can only be filled up to a subset sum
    of the groups, and all that stays empty must be within the spare room.
    """
    order = np.argsort(-size, kind="stable")
    sizes: list[int] = size[order].tolist()
    if len(sizes) > _EXACT_GROUPS:
        return None
    spare = int(room.sum()) - sum(sizes)
    reach = [1]  # bit s: a subset of the last groups adds up to s
    for rows in reversed(sizes):
        reach.append(reach[-1] | reach[-1] << rows)
    reach.reverse()
    left: list[int] = room.tolist()
    chosen: list[int] = []
    failed: set[tuple[int, ...]] = set()

    def empty(rows: int, sums_: int) -> int:
        return rows + 1 - (sums_ & ((1 << (rows + 1)) - 1)).bit_length()

    def place(i: int) -> bool:
        if i == len(sizes):
            return True
        state = (i, *sorted(left))
        if state in failed or len(failed) >= _EXACT_NODES:
            return False
        if sum(empty(rows, reach[i]) for rows in left) <= spare:
            best = {rows: bin_ for bin_, rows in enumerate(left) if rows >= sizes[i]}
            for rows in sorted(best):
                left[best[rows]] -= sizes[i]
                chosen.append(best[rows])
                if place(i + 1):
                    return True
                left[chosen.pop()] += sizes[i]
        failed.add(state)
        return False

    if not place(0):
        return None
    part = np.empty(size.size, dtype=np.int64)
    part[order] = chosen
    return part
