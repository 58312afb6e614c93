"""``plan_rebalance`` against exhaustive search, and what it never does."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise._arrays import IntArray
from equipoise.rollout.policy.holdings import Holdings, gather
from equipoise.rollout.policy.victims import fit, pick
from equipoise.rollout.policy.worth import saved_seconds


@dataclass(frozen=True)
class Small:
    """A group small enough to try every assignment."""

    ranks: list[list[eq.Request]]
    tiers: tuple[int, ...]
    slots: list[int] | None


@st.composite
def small_groups(draw: st.DrawFn) -> Small:
    num_ranks = draw(st.integers(1, 3))
    count = draw(st.integers(0, 6))
    where = draw(st.lists(st.integers(0, num_ranks - 1), min_size=count, max_size=count))
    ranks: list[list[eq.Request]] = [[] for _ in range(num_ranks)]
    for i, rank in enumerate(where):
        running = draw(st.sampled_from([True, True, True, False]))
        tokens = draw(st.integers(0, 5))
        ranks[rank].append(eq.Request(f"r{i}", tokens, tokens if running else 0, running=running))
    tiers = tuple(sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=4)), reverse=True))
    slots = draw(st.none() | st.lists(st.integers(1, 4), min_size=num_ranks, max_size=num_ranks))
    return Small(ranks, tiers, slots)


def tier_of(most: int, tiers: tuple[int, ...]) -> int:
    return min((tier for tier in tiers if tier >= most), default=most)


def best_by_search(case: Small) -> tuple[int, int, int]:
    """Least (tier, moves, KV tokens) over all assignments in which no receiver exceeds its slots."""
    requests = [(rank, request) for rank, held in enumerate(case.ranks) for request in held]
    found: list[tuple[int, int, int]] = []
    for to in itertools.product(range(len(case.ranks)), repeat=len(requests)):
        after = Counter(to)
        moved = [
            (rank, target, request) for (rank, request), target in zip(requests, to, strict=True) if rank != target
        ]
        if case.slots and any(after[target] > case.slots[target] for _, target, _ in moved):
            continue
        most = max(after.values(), default=0)
        found.append((tier_of(most, case.tiers), len(moved), sum(request.kv_tokens for _, _, request in moved)))
    return min(found)


def score(case: Small, moves: list[eq.Move]) -> tuple[int, int, int]:
    held = apply(case.ranks, moves)
    cost = {request.id: request.kv_tokens for rank in case.ranks for request in rank}
    most = max(map(len, held))
    return tier_of(most, case.tiers), len(moves), sum(cost[move.request_id] for move in moves)


def apply(ranks: list[list[eq.Request]], moves: list[eq.Move]) -> list[set[object]]:
    """Ids on each rank after the moves; fails where a move takes what its sender does not hold."""
    held: list[set[object]] = [{request.id for request in rank} for rank in ranks]
    arrived: list[set[object]] = [set() for _ in ranks]
    for move in moves:
        assert move.from_rank != move.to_rank
        held[move.from_rank].remove(move.request_id)
        arrived[move.to_rank].add(move.request_id)
    return [stays | new for stays, new in zip(held, arrived, strict=True)]


@given(case=small_groups())
@settings(max_examples=150, deadline=None)
def test_small_groups_are_planned_as_well_as_exhaustive_search_does(case: Small) -> None:
    num_running = sum(request.running for rank in case.ranks for request in rank)
    if case.slots is not None and num_running > sum(case.slots):
        with pytest.raises(eq.InfeasiblePlan):
            eq.plan_rebalance(case.ranks, tiers=case.tiers, slots=case.slots)
        return
    moves = eq.plan_rebalance(case.ranks, tiers=case.tiers, slots=case.slots)
    full = [len(rank) > limit for rank, limit in zip(case.ranks, case.slots or [9] * 3, strict=False)]
    waiting = any(over and not all(r.running for r in rank) for over, rank in zip(full, case.ranks, strict=True))
    if waiting and moves:  # the exception: what waits first fills places that are free
        assert score(case, moves)[0] <= score(case, [])[0]
        return
    # above the largest tier there is none to reach
    if max(map(len, case.ranks)) > case.tiers[0] and best_by_search(case)[0] > case.tiers[0]:
        assert moves == []
        return
    best = best_by_search(case)
    expected = best if best[0] < score(case, [])[0] else score(case, [])
    assert score(case, moves) == expected


@st.composite
def groups(draw: st.DrawFn) -> list[list[eq.Request]]:
    counts = draw(st.lists(st.integers(0, 70) | st.integers(0, 6), min_size=1, max_size=12))
    tokens = draw(st.lists(st.integers(1, 5000), min_size=sum(counts), max_size=sum(counts)))
    known = draw(st.booleans())
    left = iter(tokens)
    return [
        [
            eq.Request((rank, i), n := next(left), n, expected_remaining=float(n % 977) if known and n % 3 else None)
            for i in range(count)
        ]
        for rank, count in enumerate(counts)
    ]


def seconds(tier: int, context: float) -> float:
    return 0.05 + 0.001 * tier + 1e-8 * context


@given(
    ranks=groups(),
    spare=st.none() | st.integers(0, 20),
    victims=st.sampled_from(["kv", "longest"]),
    timed=st.booleans(),
    capacity=st.none() | st.integers(0, 200_000),
    price=st.sampled_from([0.0, 1e-4]),
)
@settings(max_examples=150, deadline=None)
def test_no_plan_raises_the_tier_overfills_a_receiver_or_loses_a_request(
    ranks: list[list[eq.Request]], spare: int | None, victims: str, timed: bool, capacity: int | None, price: float
) -> None:
    tiers = (64, 32, 16, 8, 4)
    limit = None if spare is None else spare + -(-sum(map(len, ranks)) // len(ranks))
    moves = eq.plan_rebalance(
        ranks,
        tiers=tiers,
        slots=limit,
        step_time=seconds if timed else None,
        victims=victims,
        kv_capacity=capacity,
        kv_price=price if timed else 0.0,
        steps_to_next_check=10,
    )
    after = apply(ranks, moves)
    assert sorted(map(str, itertools.chain(*after))) == sorted(str(r.id) for rank in ranks for r in rank)
    before_tier, after_tier = (tier_of(max(map(len, side)), tiers) for side in (ranks, after))
    assert after_tier < before_tier if moves else after_tier == before_tier
    cost = {request.id: request.kv_tokens for rank in ranks for request in rank}
    for rank in {move.to_rank for move in moves}:
        assert limit is None or len(after[rank]) <= limit
        assert capacity is None or sum(cost[i] for i in after[rank]) <= capacity  # pyright: ignore[reportArgumentType]
    assert not {move.from_rank for move in moves} & {move.to_rank for move in moves}
    assert len(moves) == sum(max(len(rank) - after_tier, 0) for rank in ranks) * (after_tier < before_tier)


@given(ranks=groups())
@settings(max_examples=100, deadline=None)
def test_flows_are_spread_over_receivers(ranks: list[list[eq.Request]]) -> None:
    moves = eq.plan_rebalance(ranks)
    if not moves:
        return
    after = apply(ranks, moves)
    tier = tier_of(max(map(len, after)), (64, 32, 16, 8, 4))
    got = Counter(move.to_rank for move in moves)
    room = [max(tier - len(rank), 0) for rank in ranks]
    most = max(got.values())
    # a rank that took two fewer than another had no room for more
    assert all(got[rank] >= most - 1 or got[rank] == room[rank] for rank in range(len(ranks)))
    pairs = Counter((move.from_rank, move.to_rank) for move in moves)
    sent = Counter(move.from_rank for move in moves)
    takers = len(got)
    even = all(got[rank] >= most - 1 for rank in got)
    assert not even or all(pairs[s, r] <= -(-sent[s] // takers) + 1 for s, r in pairs)


@given(ranks=groups())
@settings(max_examples=50, deadline=None)
def test_a_second_plan_has_nothing_left_to_do(ranks: list[list[eq.Request]]) -> None:
    moves = eq.plan_rebalance(ranks)
    by_id = {request.id: request for rank in ranks for request in rank}
    moved: list[list[eq.Request]] = [[by_id[i] for i in held] for held in apply(ranks, moves)]  # pyright: ignore[reportArgumentType]
    assert eq.plan_rebalance(moved) == []


@given(ranks=groups())
@settings(max_examples=30, deadline=None)
def test_the_same_state_gives_the_same_plan(ranks: list[list[eq.Request]]) -> None:
    again = [[eq.Request(r.id, r.num_tokens, r.kv_tokens, r.running, r.expected_remaining) for r in x] for x in ranks]
    assert eq.plan_rebalance(ranks) == eq.plan_rebalance(again)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Holdings, IntArray]:
    """Few values each, so that keys tie; and how many leave each rank."""
    count = draw(st.integers(1, 100))  # ranks: more than are sorted at once
    held = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    seed = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    huge = draw(st.sampled_from([1, 2**38]))
    known = draw(st.sampled_from([0.0, 0.7, 1.0]))
    ranks = [
        [
            eq.Request(
                (rank, i),
                num_tokens=(tokens := int(seed.integers(1, 4)) * huge),
                kv_tokens=tokens if (running := bool(seed.random() < 0.8)) else 0,
                running=running,
                expected_remaining=float(seed.integers(1, 4)) if seed.random() < known else None,
            )
            for i in range(number)
        ]
        for rank, number in enumerate(held)
    ]
    moved = frozenset((rank, i) for rank, number in enumerate(held) for i in range(number) if seed.random() < 0.2)
    return gather(ranks, moved), np.array([int(seed.integers(0, number + 1)) for number in held], dtype=np.int64)


@given(case=crowds(), longest=st.booleans())
@settings(max_examples=100, deadline=None)
def test_victims_are_those_of_a_plain_sort(case: tuple[Holdings, IntArray], longest: bool) -> None:
    holdings, excess = case
    donors = excess[holdings.rank] > 0
    known = bool((~np.isnan(holdings.remaining[donors])).any())
    expected: list[int] = []
    for rank, number in enumerate(excess.tolist()):
        mine: list[int] = np.flatnonzero(holdings.rank == rank).tolist()

        def key(i: int) -> tuple[float, ...]:
            runs, moved, left = bool(holdings.running[i]), bool(holdings.moved[i]), -float(holdings.expected[i])
            cache = float(2 * holdings.kv_tokens[i] + runs)
            return (moved, runs, left, cache, i) if longest else (moved, cache, left if known else 0.0, i)

        expected += sorted(mine, key=key)[:number]
    assert pick(holdings, excess, longest=longest).tolist() == expected


@given(case=crowds(), spare=st.integers(1, 12), space=st.integers(1, 30), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_places_within_memory_are_those_of_a_plain_search(
    case: tuple[Holdings, IntArray], spare: int, space: int, seed: int
) -> None:
    holdings, excess = case
    leaving = pick(holdings, excess, longest=False)
    room = np.where(excess > 0, 0, spare)
    need: list[int] = np.where(holdings.running, holdings.kv_tokens, holdings.num_tokens).tolist()
    unit = min([size for size in need if size], default=1)
    free: list[int] = [int(n) * unit for n in np.random.default_rng(seed).integers(0, space + 1, room.size)]
    capacity = np.array(free, dtype=np.int64)
    for i in set(range(len(need))) - set(leaving.tolist()):
        capacity[holdings.rank[i]] += need[i]
    got = [0] * room.size
    to: dict[int, int] = {}
    for i in sorted(leaving.tolist(), key=need.__getitem__, reverse=True):
        able = [r for r in range(room.size) if got[r] < room[r] and free[r] >= need[i]]
        if not able:
            break
        to[i] = min(able, key=lambda r: (got[r], -free[r], r))
        got[to[i]] += 1
        free[to[i]] -= need[i]
    found = fit(holdings, leaving, room, capacity)
    if len(to) < leaving.size:
        assert found is None
    else:
        assert found is not None
        assert found.tolist() == [to[i] for i in leaving.tolist()]


@given(case=crowds(), target=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_the_saving_is_that_of_every_rank_looked_at_alone(case: tuple[Holdings, IntArray], target: int) -> None:
    holdings, _ = case
    tiers = np.array([target, 16])
    if int(holdings.held.max()) <= target:
        return
    mean = np.maximum(holdings.expected, 1.0)
    most = float(mean[holdings.held[holdings.rank] > target].max())
    until = 0.0
    for rank in np.flatnonzero(holdings.held > target).tolist():
        low, high = 0.0, most * float(np.log(holdings.held[rank] / target))
        for _ in range(14):
            middle = (low + high) / 2
            more = float(np.exp(-middle / mean[holdings.rank == rank]).sum()) > target
            low, high = (middle, high) if more else (low, middle)
        until = max(until, high)
    saved = saved_seconds(holdings, target, tiers, lambda tier, context: float(tier), (0.0, 0.0))
    assert saved == pytest.approx(until * (16 - target), rel=1e-9)
