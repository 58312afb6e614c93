"""When a rebalancer moves requests, from what ranks measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from equipoise.config import RolloutConfig
from equipoise.errors import InvalidInput
from equipoise.rollout.decode import DecodeConfig
from equipoise.rollout.policy.moves import plan_rebalance
from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import EngineFacts, KVLayout
from equipoise.rollout.transfer.config import RebalancerConfig
from equipoise.rollout.transfer.knowledge import Knowledge, counts_after
from equipoise.rollout.transfer.tables import fitting
from equipoise.rollout.transfer.wire import Row, Table

TIERS = (8, 4, 2)
FACTS = EngineFacts(
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=8, dtype="float32"),
    model="m",
    tiers=TIERS,
    slots=8,
    free_blocks=100,
    num_blocks=200,
)
TIMES = ((8, 400, 1.0), (8, 500, 1.0), (8, 600, 1.0), (4, 200, 0.5), (4, 250, 0.5), (4, 300, 0.5))
FLAT = tuple((tier, context, 1.0) for tier, context, _ in TIMES)


def tables(
    *counts: int, samples: Any = (), exchange_s: float = 0.0, prefilled: Any = (0, 0.0), **facts: Any
) -> list[Table]:
    made: list[Table] = []
    for rank, count in enumerate(counts):
        rows = tuple(
            Row(
                id=f"{rank}.{index}",
                home=rank,
                prompt=index,
                num_tokens=60,
                num_output=40,
                num_cached=59,
                running=True,
                max_remaining=100,
            )
            for index in range(count)
        )
        mine = samples if rank == 0 else ()
        changed = replace(FACTS, **facts)
        told: dict[str, Any] = {"samples": mine, "exchange_s": exchange_s, "prefilled": prefilled}
        made.append(Table(facts=changed, check=0, settings=0, rows=rows, **told))
    return made


def moves(found: list[Table], **settings: Any) -> tuple[list[Move], float]:
    known = Knowledge(RebalancerConfig(tiers=TIERS, **settings))
    known.learn(found)
    return known.plan(found, plan_rebalance)


@pytest.mark.parametrize(
    ("samples", "settings", "number"),
    [
        ((), {}, 4),  # nothing measured: by counts
        (TIMES, {}, 4),
        (FLAT, {}, 0),  # a lower tier is no faster
        (FLAT, {"multi_graph": False}, 4),
        (TIMES, {"min_gain": 1.0}, 4),
        (TIMES, {"min_gain": 1e6}, 0),
        (TIMES[:5], {"min_gain": 1e6}, 4),  # two steps of the lower tier are too few to judge it
    ],
)
def test_moves_take_place_where_they_pay(samples: Any, settings: dict[str, Any], number: int) -> None:
    found, predicted = moves(tables(8, 0, samples=samples), **settings)
    assert len(found) == number
    assert (predicted > 0) == (number > 0 and samples == TIMES and "multi_graph" not in settings)


@pytest.mark.parametrize(("s_per_token", "saved_s"), [(0.0, 0.5), (1e-3, 0.5 + 0.472 - 0.236)])
def test_the_predicted_saving_is_steps_times_what_tier_and_context_save(s_per_token: float, saved_s: float) -> None:
    """Each of the eight has 59 tokens in the cache, and half move; by themselves half would be done in 40 steps."""
    samples = [(tier, context, seconds + s_per_token * context) for tier, context, seconds in TIMES]
    found = tables(8, 0, samples=samples)
    rows = tuple(replace(row, max_remaining=10 * (8 - i)) for i, row in enumerate(found[0].rows))
    found[0] = replace(found[0], rows=rows)
    known = Knowledge(RebalancerConfig(tiers=TIERS))
    known.learn(found)
    assert known.plan(found, plan_rebalance)[1] == pytest.approx(40 * saved_s)


def test_an_exchange_that_took_long_is_held_against_the_next() -> None:
    known = Knowledge(RebalancerConfig(tiers=TIERS))
    found = tables(8, 0, samples=TIMES)
    known.learn(found)
    planned, _ = known.plan(found, plan_rebalance)
    known.note_moves(found, planned)
    known.learn(tables(8, 0, exchange_s=1e4))
    assert known.plan(found, plan_rebalance) == ([], 0.0)


def test_what_moved_last_stays_where_others_can_move() -> None:
    known = Knowledge(RebalancerConfig(tiers=TIERS))
    found = tables(8, 0)
    first, _ = known.plan(found, plan_rebalance)
    known.note_moves(found, first)
    second, _ = known.plan(found, plan_rebalance)
    assert len(first) == len(second) == 4
    assert not {move.request_id for move in first} & {move.request_id for move in second}


def test_a_move_without_its_cache_must_pay_for_the_prefill() -> None:
    """Half a second a step for 100 steps at most, against 240 tokens at a second each."""
    for seconds, transfer, number in ((0.01, "recompute", 4), (1.0, "recompute", 0), (1.0, "kv", 4)):
        found = tables(8, 0, samples=TIMES, prefilled=(100, 100 * seconds))
        assert len(moves(found, transfer=transfer)[0]) == number


@pytest.mark.parametrize("transfer", ["kv", "recompute"])
def test_only_what_the_receiver_has_room_for_moves(transfer: str) -> None:
    assert len(moves(tables(8, 0, free_blocks=17), transfer=transfer)[0]) == 2


def test_a_request_that_waits_needs_no_room() -> None:
    found = tables(1, 8, free_blocks=0)
    waits = replace(found[0].rows[0], running=False, num_cached=0)
    found[0] = replace(found[0], rows=(waits,))
    wanted = [Move(0, 1, "0.0")]
    assert fitting(found, wanted, transfer="kv") == fitting(found, wanted, transfer="recompute") == wanted


def test_the_planner_is_told_of_slots_and_of_the_tokens_that_caches_hold() -> None:
    told: dict[str, Any] = {}

    def planner(*_: Any, **named: Any) -> list[Move]:
        told.update(named)
        return []

    found = [*tables(1), *tables(0, slots=5, num_blocks=30)]
    Knowledge(RebalancerConfig(tiers=TIERS)).plan(found, planner)
    assert (told["tiers"], told["slots"], told["kv_capacity"]) == (TIERS, [8, 5], [200 * 8, 30 * 8])


def test_a_receiver_takes_no_more_than_its_free_slots() -> None:
    found = tables(8, 3, 8, slots=4)
    wanted = [Move(0, 1, "0.0"), Move(0, 1, "0.1"), Move(2, 1, "2.0")]
    assert fitting(found, wanted, transfer="kv") == wanted[:1]


@pytest.mark.parametrize(("transfer", "number"), [("kv", 1), ("recompute", 0)])
def test_a_prefill_needs_room_for_all_tokens_and_a_cache_for_those_it_holds(transfer: str, number: int) -> None:
    found = tables(1, 0, free_blocks=7)
    row = replace(found[0].rows[0], num_tokens=57, num_cached=56)
    found[0] = replace(found[0], rows=(row,))
    assert len(fitting(found, [Move(0, 1, "0.0")], transfer=transfer)) == number


def test_moves_change_what_ranks_hold() -> None:
    assert counts_after([["a", "b", "c"], [], ["d"]], [Move(0, 1, "a"), Move(0, 2, "b"), Move(2, 1, "d")]) == [1, 2, 1]


def test_a_planner_that_makes_requests_up_is_an_error() -> None:
    known = Knowledge(RebalancerConfig(tiers=TIERS))
    with pytest.raises(InvalidInput, match="move of request 'x'"):
        known.plan(tables(2, 0), lambda *_, **__: [Move(0, 1, "x")])


def test_defaults_are_those_of_the_configuration() -> None:
    assert RebalancerConfig.of(RolloutConfig()) == RebalancerConfig()
    assert DecodeConfig().tiers == RebalancerConfig().tiers == tuple(RolloutConfig().tiers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"check_interval": 0}, "check_interval"),
        ({"tiers": (4, 8)}, "tiers"),
        ({"transfer": "mail"}, "transfer"),
        ({"min_gain": float("nan")}, "min_gain"),
        ({"profile_interval": 0}, "profile_interval"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        RebalancerConfig(**change)
