"""``pack``: rows into as few capped groups as possible, then evenly.

The contract is that of AReaL's micro-batch specification: at least ``min_groups`` groups, a multiple of ``multiple``,
none above the capacity.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, Protocol

import numpy as np

from equipoise._arrays import BoolArray, FloatArray, IntArray, counts, int_sums, positions
from equipoise._checks import as_lengths, positive
from equipoise.errors import EquipoiseWarning, InfeasiblePlan, InvalidInput, must, nearest
from equipoise.planning.partition import karmarkar_karp
from equipoise.planning.partition.board import Boards, Rules
from equipoise.planning.partition.divide import checked_weights
from equipoise.planning.partition.refine import fit_cap, polish
from equipoise.registry import Registry


class Packer(Protocol):
    """Fills groups under a cap."""

    def __call__(self, tokens: IntArray, weights: FloatArray, capacity: int, least: int, multiple: int) -> IntArray:
        """Group of each row, shape (n,): at least ``least`` groups, a multiple of ``multiple``, none empty."""
        ...


packers: Registry[Packer] = Registry("packer")


def pack(
    lengths: Any,
    *,
    capacity: int,
    min_groups: int = 1,
    multiple: int = 1,
    algorithm: str = "refined",
    weights: Any = None,
    oversize: Literal["error", "alone"] = "error",
) -> list[IntArray]:
    """Fill groups of at most ``capacity`` tokens.

    Args:
        lengths: tokens of each row, shape (n,).
        capacity: the most tokens in a group.
        min_groups: the fewest groups.
        multiple: the number of groups is a multiple of this.
        algorithm: "ffd" (first fit decreasing), "kk" (largest differencing into a growing number of groups, or first
            fit if that needs fewer) or "refined" (the fewest groups that a search finds, then balanced).
        weights: what "kk" and "refined" balance, shape (n,); the lengths if None.
        oversize: whether a row above the capacity is an "error" or a group of its own ("alone", with a warning).

    Returns:
        Arrays of row ids, ascending within a group; groups are ordered by their first row.

    Raises:
        InvalidInput: an argument breaks its rule.
        InfeasiblePlan: a row is above the capacity, or there must be more groups than rows.
        UnknownName: there is no such algorithm.

    >>> [group.tolist() for group in pack([5, 4, 3, 3], capacity=8)]
    [[0, 2], [1, 3]]
    """
    tokens = as_lengths(lengths)
    cap = min(positive("capacity", capacity, "pass the tokens that a group may hold"), 2**62)
    least = positive("min_groups", min_groups, "use 1 for as few as fit")
    step = positive("multiple", multiple, "use 1 for any number")
    values = tokens.astype(np.float64) if weights is None else checked_weights(weights)
    if values.shape != tokens.shape:
        raise InvalidInput(must("weights", f"have shape {tokens.shape}", values.shape, "pass one weight per row"))
    packer = packers[algorithm]
    _check_oversize(tokens, cap, oversize)
    group = packer(tokens, values, cap, round_up(least, step), step)
    return sorted(positions(group, int(group.max()) + 1), key=lambda rows: int(rows[0]))


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is at least ``count``."""
    return -(-count // multiple) * multiple


def fewest_groups(tokens: IntArray, capacity: int) -> int:
    """Lower bound on the number of groups.

    No two rows above half the capacity share a group, nor does a row of at least s tokens join one of more than
    capacity - s (the bound L2 of S. Martello and P. Toth, Knapsack Problems, 1990, section 8.3).
    """
    rest = np.sort(tokens[tokens <= capacity])
    upto: IntArray = np.append(0, np.cumsum(rest))
    half = int(np.searchsorted(rest, capacity // 2, side="right"))  # from here on, rows are above half
    small: IntArray = np.append(0, rest[:half])
    large = np.searchsorted(rest, capacity - small, side="right")
    room = (large - half) * capacity - (upto[large] - upto[half])
    between = upto[half] - upto[np.searchsorted(rest, small, side="left")]
    more = int((-(-(between - room) // capacity)).max())
    best = max(-(-int(upto[-1]) // capacity), rest.size - half + max(0, more))
    return tokens.size - rest.size + best


def _check_oversize(tokens: IntArray, capacity: int, oversize: str) -> None:
    options = ("error", "alone")
    if oversize not in options:
        raise InvalidInput(must("oversize", f"be one of {list(options)}", oversize, nearest(str(oversize), options)))
    row = int(tokens.argmax())
    length = int(tokens[row])
    if length <= capacity:
        return
    remedy = f'raise capacity to {length}, shorten the row, or pass oversize="alone"'
    text = must(f"lengths[{row}]", f"be at most capacity = {capacity}", length, remedy)
    if oversize == "error":
        raise InfeasiblePlan(text)
    warnings.warn(f"{text}; it gets a group of its own", EquipoiseWarning, stacklevel=3)


def first_fit(tokens: IntArray, capacity: int) -> IntArray:
    """Group of each row: longest row first, each to the first group with room."""
    group = np.empty(tokens.size, dtype=np.int64)
    room = np.full(tokens.size, capacity, dtype=np.int64)
    used = 0
    for row in np.argsort(-tokens, kind="stable").tolist():
        fits: BoolArray = room[:used] >= tokens[row]
        group[row] = to = int(fits.argmax()) if fits.any() else used
        used = max(used, to + 1)
        room[to] -= tokens[row]
    return group


def _widest_room(tokens: IntArray, weights: FloatArray, capacity: int, groups: int) -> IntArray | None:
    """Group of each row: longest row first, each to the lightest group with room; None if a row finds none."""
    group = np.empty(tokens.size, dtype=np.int64)
    room = np.full(groups, capacity, dtype=np.int64)
    load = np.zeros(groups)
    for row in np.lexsort((-weights, -tokens)).tolist():
        fits: BoolArray = (room >= tokens[row]) | (room == capacity)  # an oversized row opens a group
        if not fits.any():
            return None
        group[row] = to = int(np.where(fits, load, np.inf).argmin())
        room[to] -= tokens[row]
        load[to] += weights[row]
    return group if counts(group, groups).min() > 0 else None


@packers.decorator("ffd")
def ffd(tokens: IntArray, weights: FloatArray, capacity: int, least: int, multiple: int) -> IntArray:
    """First fit decreasing; if more groups are required, rows are spread over them, the longest first."""
    group = first_fit(tokens, capacity)
    needed = int(group.max()) + 1
    groups = round_up(max(needed, least), multiple)
    if groups > tokens.size:
        rule = f"be at most the number of rows, {tokens.size}, so that none is empty"
        remedy = f"raise capacity, or lower min_groups or multiple = {multiple}"
        raise InfeasiblePlan(must("the number of groups", rule, groups, remedy))
    if groups == needed:
        return group
    spread = _widest_room(tokens, tokens.astype(np.float64), capacity, groups)
    return spread if spread is not None else _split_to(group, tokens, groups)


@packers.decorator("kk")
def kk(tokens: IntArray, weights: FloatArray, capacity: int, least: int, multiple: int) -> IntArray:
    """Largest differencing into a growing number of groups until all fit, or first fit if that needs fewer."""
    fallback = ffd(tokens, weights, capacity, least, multiple)
    fewest = round_up(max(fewest_groups(tokens, capacity), least), multiple)
    for groups in range(fewest, int(fallback.max()) + 2, multiple):
        group = karmarkar_karp.free_size(weights, groups)
        rows = counts(group, groups)
        if rows.min() > 0 and not ((int_sums(group, tokens, groups) > capacity) & (rows > 1)).any():
            return group
    return fallback


@packers.decorator("refined")
def refined(tokens: IntArray, weights: FloatArray, capacity: int, least: int, multiple: int) -> IntArray:
    """The fewest groups that first fit or a search finds, then balanced by swaps and moves."""
    found = ffd(tokens, weights, capacity, least, multiple)
    fewest = round_up(max(fewest_groups(tokens, capacity), least), multiple)
    tried = (_fitted(tokens, capacity, groups) for groups in range(fewest, int(found.max()) + 1, multiple))
    found = next((group for group in tried if group is not None), found)
    return _evened_out(found, tokens, weights, capacity)


def _fitted(tokens: IntArray, capacity: int, groups: int) -> IntArray | None:
    """A packing into ``groups`` groups, found by balancing tokens; None if the search finds none."""
    values = tokens.astype(np.float64)
    start = karmarkar_karp.free_size(values, groups)
    if counts(start, groups).min() == 0:
        return None
    boards = Boards(values[None], tokens[None], start[None], num_ranks=groups, num_columns=1)
    return boards.cell[0] if fit_cap(boards, Rules(cap=capacity, moves="any")).all() else None


def _evened_out(group: IntArray, tokens: IntArray, weights: FloatArray, capacity: int) -> IntArray:
    """The better of two starts after swaps and moves: this packing, and ``_widest_room``."""
    groups = int(group.max()) + 1
    spread = _widest_room(tokens, weights, capacity, groups)
    cells = np.stack([group] if spread is None else [group, spread])
    alike = np.ones((len(cells), 1))
    boards = Boards(weights * alike, tokens * alike.astype(np.int64), cells, num_ranks=groups, num_columns=1)
    polish(boards, Rules(cap=capacity, moves="any"))
    best = np.lexsort(((boards.load**2).sum(axis=1), boards.lockstep()))[0]
    return boards.cell[int(best)]


def _split_to(group: IntArray, tokens: IntArray, groups: int) -> IntArray:
    """Halve the groups with the most rows until there are ``groups`` of them."""
    split: IntArray = np.array(group)
    for new in range(int(split.max()) + 1, groups):
        rows = np.flatnonzero(split == counts(split, new).argmax())
        falling = rows[np.argsort(-tokens[rows], kind="stable")]
        split[falling[1::2]] = new
    return split
