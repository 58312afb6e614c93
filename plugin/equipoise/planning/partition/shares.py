"""Groups of rows to bins with room for a fixed number of rows each: whole groups, even cost.

Bin packing with costs. Greedy first, then moves and swaps of whole groups, then, for few groups, an exhaustive search
over the rows that are left in each bin.
"""

from __future__ import annotations

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, int_sums, iota, sums
from equipoise.planning.partition.board import Boards, Rules
from equipoise.planning.partition.refine import even_out_loads, polish

_MAX_STEPS = 2000
_MAX_PAIRS = 20_000_000  # looked at by all steps of one search: some 0.2 s
_EXACT_GROUPS = 200
_EXACT_NODES = 20_000


def share_out(size: IntArray, cost: FloatArray, room: IntArray, *, by: str) -> IntArray | None:
    """Bin of each group, shape (G,), none of them holding more rows than it has room for; None if none was found.

    Args:
        size: rows of each group, shape (G,).
        cost: of each group, shape (G,).
        room: rows that each bin takes, shape (k,). What groups do not fill is left to single rows.
        by: which group chooses first: "cost", the dearest, or "size", the one with the most rows. Both choose the
            cheapest bin with room.

    >>> share_out(np.array([2, 1, 1]), np.array([5.0, 3.0, 1.0]), np.array([2, 2]), by="cost").tolist()
    [0, 1, 1]
    """
    order = np.argsort(-cost, kind="stable") if by == "cost" else np.lexsort((-cost, -size))
    part = _cheapest_first(size, cost, room, order)
    if not _over(part, size, room).any():
        return part
    part = _make_room(part, size, room)
    if not _over(part, size, room).any():
        return part
    return _exhaustive(size, room)


def level_shares(part: IntArray, size: IntArray, cost: FloatArray, room: IntArray) -> IntArray:
    """The shares after swaps and moves of whole groups that lower the dearest bin; rows stay within the room."""
    boards = Boards(
        cost[None],
        np.zeros((1, cost.size), dtype=np.int64),
        part[None],
        num_ranks=room.size,
        num_columns=1,
        kind=size[None],
    )
    rules = Rules(moves="none")
    before = float(boards.lockstep()[0])
    even_out_loads(boards, rules)
    polish(boards, rules)
    part = np.array(boards.cell[0] if float(boards.lockstep()[0]) < before else part)
    load, rows = sums(part, cost, room.size), int_sums(part, size, room.size)
    looked_at = 0
    for _ in range(_MAX_STEPS):
        top = int(load.argmax())
        mine, partner, there = _partners(part, top, room.size)
        looked_at += mine.size * there.size
        if looked_at > _MAX_PAIRS or not mine.size or not there.size:
            break
        # the last, empty partner stands for none
        shift = cost[mine][:, None] - np.append(cost, 0.0)[partner]
        grown = size[mine][:, None] - np.append(size, 0)[partner]
        fits: BoolArray = (rows[there] + grown <= room[there]) & (rows[top] - grown <= room[top]) & (shift > 0)
        after: FloatArray = np.where(fits, np.maximum(load[top] - shift, load[there] + shift), np.inf)
        a, b = divmod(int(after.argmin()), there.size)
        if not after[a, b] < load[top] * (1 - 1e-12):
            break
        _trade(part, int(mine[a]), int(partner[b]), int(there[b]))
        load, rows = sums(part, cost, room.size), int_sums(part, size, room.size)
    return part


def _partners(part: IntArray, top: int, bins: int) -> tuple[IntArray, IntArray, IntArray]:
    """Groups of bin ``top``; every group elsewhere and, as number G, none; and the bin of each partner."""
    others = np.flatnonzero(part != top)
    elsewhere = np.flatnonzero(iota(bins) != top)
    partner = np.concatenate([others, np.full(elsewhere.size, part.size, dtype=np.int64)])
    return np.flatnonzero(part == top), partner, np.concatenate([part[others], elsewhere])


def _trade(part: IntArray, group: int, partner: int, there: int) -> None:
    if partner < part.size:
        part[partner] = part[group]
    part[group] = there


def _over(part: IntArray, size: IntArray, room: IntArray) -> IntArray:
    """Rows of each bin for which it has no room, shape (k,)."""
    return np.maximum(int_sums(part, size, room.size) - room, 0)


def _cheapest_first(size: IntArray, cost: FloatArray, room: IntArray, order: IntArray) -> IntArray:
    """Groups in this order to the cheapest bin with room for them, or else to the one with the most room."""
    left: IntArray = np.array(room, dtype=np.int64)
    load = np.zeros(room.size)
    part = np.empty(size.size, dtype=np.int64)
    for group in order.tolist():
        fits: BoolArray = left >= size[group]
        part[group] = bin_ = int(np.where(fits, load, np.inf).argmin()) if fits.any() else int(left.argmax())
        left[bin_] -= size[group]
        load[bin_] += cost[group]
    return part


def _make_room(part: IntArray, size: IntArray, room: IntArray) -> IntArray:
    """Move or swap whole groups of the bin that is most over while that leaves fewer rows without room."""
    part = np.array(part)
    looked_at = 0
    for _ in range(_MAX_STEPS):
        rows = int_sums(part, size, room.size)
        over = np.maximum(rows - room, 0)
        top = int(over.argmax())
        mine, partner, there = _partners(part, top, room.size)
        looked_at += mine.size * there.size
        if not over[top] or not there.size or looked_at > _MAX_PAIRS:
            break
        grown = size[mine][:, None] - np.append(size, 0)[partner]
        after = np.maximum(rows[top] - grown - room[top], 0) + np.maximum(rows[there] + grown - room[there], 0)
        gain = over[top] + over[there] - after
        a, b = divmod(int(gain.argmax()), there.size)
        if gain[a, b] <= 0:
            break
        _trade(part, int(mine[a]), int(partner[b]), int(there[b]))
    return part


def _exhaustive(size: IntArray, room: IntArray) -> IntArray | None:
    """Groups from the largest down, into the bin that they fill best, with every other bin as an alternative.

    Ends early where the groups that are left cannot add up to what the bins have left: of a bin's rows only a subset
    sum of the groups can be filled, and what stays empty everywhere is at most the room to spare.
    """
    order = np.argsort(-size, kind="stable")
    sizes: list[int] = size[order].tolist()
    if len(sizes) > _EXACT_GROUPS:
        return None
    spare = int(room.sum()) - sum(sizes)
    reach = [1]  # bit s: some of the last groups add up to s
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
