"""The parts of the router of verl's rollout servers, one by one: ledger, conversations, lengths, moves, watch."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import pytest

from equipoise.config import RolloutConfig
from equipoise.rollout.policy.moves import VICTIMS
from equipoise.rollout.policy.step_time import StepTime
from equipoise.trainer_hooks.on_verl.router.conversations import Conversation, Conversations
from equipoise.trainer_hooks.on_verl.router.ledger import Held, Ledger
from equipoise.trainer_hooks.on_verl.router.lengths import ExpectedLengths
from equipoise.trainer_hooks.on_verl.router.moves import MovePlanner
from equipoise.trainer_hooks.on_verl.router.watch import Watch
from tests.unit.router_sim import Clock


def held(request: str, server: str, *, expected: float = 0.0, prompt: str = "p", **more: Any) -> Held:
    named: dict[str, Any] = {"server_request_id": request, "prompt_tokens": 0, "since": 0.0, **more}
    return Held(request_id=request, server=server, prompt=prompt, expected=expected, **named)


def ledger(*requests: Held) -> Ledger:
    found = Ledger(["a", "b"])
    for each in requests:
        found.hold(each)
    return found


# -- ledger ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "goes_to"), [(50, "a"), (50.5, "b")])
def test_a_turn_stays_at_home_while_others_have_less_by_no_more_than_its_prompt(load: float, goes_to: str) -> None:
    assert ledger(held("r", "a", expected=load)).choose("q", 50, 1000, home="a") == goes_to


@pytest.mark.parametrize(("load", "goes_to"), [(50, "b"), (50.5, "a")])
def test_siblings_part_among_replicas_within_half_of_the_expected_length(load: float, goes_to: str) -> None:
    """``a`` has a sibling and nothing else to do; ``b`` has no sibling."""
    found = ledger(held("sibling", "a"), held("other", "b", expected=load, prompt="q"))
    assert found.choose("p", 0, 100, home=None) == goes_to


def test_of_replicas_with_equal_siblings_the_least_loaded_is_chosen_then_that_with_fewest_requests() -> None:
    found = ledger(held("1", "a", expected=10, prompt="q"), *(held(i, "b", expected=4, prompt="q") for i in "23"))
    assert found.choose("p", 0, 100, home=None) == "b"
    found.expect(found.of("2")[0], 6)
    assert found.load == {"a": 10, "b": 10}
    assert found.choose("p", 0, 100, home=None) == "a"


def test_a_sibling_that_has_left_counts_no_more() -> None:
    found = ledger(held("1", "a"), held("2", "b"), held("3", "b"))
    for request in "23":
        found.drop(request, "b")
    assert found.choose("p", 0, 100, home=None) == "b"


def test_a_request_leaves_the_replica_that_is_named() -> None:
    found = ledger(held("1", "a", expected=7), held("1", "b", expected=9))
    dropped = found.drop("1", "b")
    assert dropped is not None
    assert dropped.server == "b"
    assert (found.running, found.load) == ({"a": 1, "b": 0}, {"a": 7, "b": 0})
    assert found.drop("1", "b") is None


def test_without_a_name_the_first_request_leaves() -> None:
    found = ledger(held("1", "a"), held("2", "b"), held("3", "b"))
    assert [each and each.request_id for each in (found.drop_any("b"), found.drop_any("b"), found.drop_any("b"))] == [
        "2",
        "3",
        None,
    ]


def test_a_replica_added_again_keeps_its_requests() -> None:
    found = ledger(held("1", "a", expected=7))
    found.add_servers(["a", "c"])
    assert (found.running, found.load) == ({"a": 1, "b": 0, "c": 0}, {"a": 7, "b": 0, "c": 0})


def test_an_empty_replica_has_exactly_nothing_outstanding() -> None:
    found = ledger(*(held(name, "a", expected=expected) for name, expected in (("1", 0.1), ("2", 0.2), ("3", 0.3))))
    for name in "123":
        found.drop(name, "a")
    assert 0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 != 0
    assert found.load["a"] == 0
    assert not found._siblings  # nothing is kept of prompts that are done


# -- conversations -----------------------------------------------------------------------------------------------------


def test_conversations_rest_in_the_order_of_their_last_use() -> None:
    talks = Conversations(2)
    for name in "abc":
        talks.hold(name, Conversation(prompt=name))
    assert [talk.prompt for talk in talks] == ["a", "b", "c"]  # under way: more than may rest
    for name in "abc":
        talks.rest(name)
    assert [talk.prompt for talk in talks] == ["b", "c"]
    assert talks.get("b") is not None
    talks.hold("d", Conversation(prompt="d"))
    talks.rest("d")
    assert (talks.get("a"), talks.get("c"), len(talks)) == (None, None, 2)
    known = talks.get("b")
    assert known is not None
    talks.hold("b", known)
    assert len(talks) == 2  # under way and resting at once would be two


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_what_is_left_is_the_mean_of_what_longer_responses_had_left() -> None:
    lengths = ExpectedLengths(limit=1000, max_prompts=9)
    for tokens in (10, 100, 300):
        lengths.finish("p", tokens)
    lengths.finish("q", 500)
    assert lengths.remaining(["p"] * 4, [0, 10, 99, 100]) == pytest.approx([410 / 3, 190, 101, 200])
    # a prompt without a longer response goes by all, one that is longer than all by half of what it has
    assert lengths.remaining(["p", "r", "p"], [300, 0, 600]) == pytest.approx([200, 910 / 4, 300])
    assert lengths.remaining(["p", "p"], [500, 990]) == [max(910 / 4, 250), 10]  # up to the limit
    assert lengths.remaining(["p"], [1000]) == [1]


def test_a_prompt_goes_by_its_last_16_responses_and_a_new_one_by_the_last_512_of_all() -> None:
    lengths = ExpectedLengths(limit=10_000, max_prompts=9)
    assert lengths.of_new("p") == 2500  # a quarter of the limit
    for tokens in range(1, 601):
        lengths.finish("p", tokens)
    assert lengths.remaining(["p"], [0]) == [(600 + 585) / 2]
    assert lengths.mean == lengths.of_new("new") == (600 + 89) / 2


def test_a_new_response_is_expected_anew_once_a_sibling_has_finished() -> None:
    lengths = ExpectedLengths(limit=1000, max_prompts=9)
    lengths.finish("p", 100)
    first = lengths.of_new("p")
    lengths.finish("p", 900)
    second = lengths.of_new("p")
    assert second > first
    lengths.next_rollout()
    assert lengths.of_new("p") == pytest.approx(500)  # the median of its history, with none of this rollout
    assert ExpectedLengths(limit=10, max_prompts=9).remaining(["p"], [0]) == [2.5]


def test_expectations_of_forgotten_prompts_are_forgotten() -> None:
    lengths = ExpectedLengths(limit=1000, max_prompts=3)
    for prompt in range(10):
        lengths.finish(prompt, 100)
        lengths.of_new(prompt)
    assert len(lengths._new) == len(lengths._known) == 3


# -- moves -------------------------------------------------------------------------------------------------------------


def planner(*, slots: int = 8, **config: Any) -> MovePlanner:
    """Decode steps take 1 s in tier 4 and 0.5 s in tier 2, both measured."""
    settings: dict[str, Any] = {"tiers": [4, 2], "profile_interval": 1, **config}
    found = MovePlanner(RolloutConfig(**settings), slots=slots)
    for beside, seconds in ((4, 1.0), (2, 0.5)):
        for _ in range(3):
            found.measured(tokens=10, seconds=10 * seconds, beside=beside)
    return found


def crowd(number: int = 4, **more: Any) -> dict[str, list[Held]]:
    return {"a": [held(f"r{i}", "a", expected=100.0, **more) for i in range(number)], "b": []}


def moved(found: MovePlanner, requests: dict[str, list[Held]], moves: dict[str, int] | None = None) -> list[str]:
    everything = [each for row in requests.values() for each in row]
    times = {each.order: (moves or {}).get(each.request_id, 0) for each in everything}
    return [each.request_id for each, _ in found.plan(requests, {each.order: 0 for each in everything}, times)]


def test_a_tier_is_the_smallest_that_holds_the_requests() -> None:
    found = planner()
    assert [found.tier(count) for count in (1, 2, 3, 4, 9)] == [2, 2, 4, 4, 4]


def test_step_times_are_kept_from_every_nth_stay() -> None:
    found = MovePlanner(RolloutConfig(profile_interval=3), slots=8)
    assert found.step_s is None
    for seconds in (10, 20, 30, 40, 50, 60, 70):
        found.measured(tokens=10, seconds=seconds, beside=1)
    assert found.step_s == 4  # the median of 1, 4 and 7
    found.measured(tokens=0, seconds=1, beside=1)
    found.measured(tokens=1, seconds=0, beside=1)
    assert found.step_s == 4


def test_the_largest_tier_is_twice_an_empty_one_until_tiers_are_measured() -> None:
    found = MovePlanner(RolloutConfig(tiers=[4, 2], profile_interval=1), slots=8)
    for _ in range(3):
        found.measured(tokens=10, seconds=15, beside=4)
    assert found.step_time([4, 0]).base_s == pytest.approx((1.5, 2.0))  # an even spread, of 2 each, was never seen
    for _ in range(3):
        found.measured(tokens=10, seconds=12, beside=2)
    found.measured(tokens=10, seconds=99, beside=1)
    assert [found.step_time([4, 0])(tier, 0) for tier in (2, 4)] == pytest.approx([1.2, 1.5])


@pytest.mark.parametrize(("slots", "seconds"), [(2, 10 * 2.0 + 20 * 1.0), (1, 10 * 1.0 / 0.5 + 20 * 1.0)])
def test_a_replica_drains_at_the_pace_of_its_tier_and_in_turns_beyond_its_slots(slots: int, seconds: float) -> None:
    found = MovePlanner(RolloutConfig(tiers=[2, 1]), slots=slots)
    times = StepTime(tiers=(1, 2), base_s=(1.0, 2.0), s_per_token=(0.0, 0.0))
    assert found.drain_s([30, 10], times) == seconds


# four requests of 100 tokens take 100 s in tier 4, two on each replica 50 s; a plan must save 10 s more than is asked


@pytest.mark.parametrize(("min_gain", "number"), [(39.9, 2), (40.1, 0)])
def test_a_move_must_save_a_tenth_of_the_time_and_the_least_gain(min_gain: float, number: int) -> None:
    found = planner(min_gain=min_gain)
    assert len(moved(found, crowd())) == number
    assert found.predicted_s == pytest.approx(50.0 if number else 0.0)
    moved(found, crowd())
    assert found.predicted_s == pytest.approx(100.0 if number else 0.0)  # until it is read


@pytest.mark.parametrize(("gap_s", "number"), [(39.9, 2), (40.1, 0)])
def test_a_move_must_save_more_than_the_time_off_all_replicas(gap_s: float, number: int) -> None:
    found = planner()
    found.gap(gap_s)
    assert len(moved(found, crowd())) == number


@pytest.mark.parametrize("config", [{"profile": False}, {"multi_graph": False}])
def test_without_measured_tiers_counts_decide(config: dict[str, Any]) -> None:
    found = planner(min_gain=1e6, **config)
    assert len(moved(found, crowd())) == 2


def test_requests_move_while_the_fullest_replica_is_above_the_smallest_tier() -> None:
    found = planner(tiers=[8, 4, 2], profile=False)
    assert [len(moved(found, crowd(number))) for number in (2, 3, 4)] == [0, 1, 2]


def test_requests_that_wait_for_a_slot_move_even_in_the_smallest_tier() -> None:
    found = planner(slots=1, profile=False)
    assert moved(found, crowd(2)) == ["r1"]  # the later one waits
    assert moved(planner(profile=False), crowd(2)) == []


def test_a_request_that_has_moved_stays_if_others_can_go_and_always_after_two_moves() -> None:
    for i in range(4):
        assert f"r{i}" not in moved(planner(), crowd(), {f"r{i}": 1})
    once = {f"r{i}": 1 for i in range(4)}
    assert len(moved(planner(), crowd(), once)) == 2
    assert moved(planner(), crowd(), dict.fromkeys(once, 2)) == []


def test_a_request_without_a_name_at_its_replica_stays() -> None:
    assert moved(planner(profile=False), crowd(server_request_id=None)) == []


def test_the_rule_that_is_predicted_to_save_most_picks_the_requests() -> None:
    requests = {**crowd(6), "c": []}
    for each, size in zip(requests["a"], (10, 20, 30, 40, 900, 1000), strict=True):
        each.expected, each.prompt_tokens = size, size  # the smallest caches leaving would keep both long ones together
    found = planner(tiers=[8, 2, 1])
    for _ in range(3):
        found.measured(tokens=10, seconds=1, beside=1)
    none = {each.order: 0 for each in requests["a"]}
    model = found.step_time([6, 0, 0])
    done_s = {
        victims: found._last_done_s(requests, found._one_plan(requests, none, none, victims), model)
        for victims in VICTIMS
    }
    best = min(done_s, key=done_s.__getitem__)
    assert best != VICTIMS[0]
    assert max(done_s.values()) > done_s[best]
    want = found._one_plan(requests, none, none, best)
    assert moved(found, requests) == [each.request_id for each, _ in want]


def test_what_a_request_holds_is_told_to_the_rule() -> None:
    found = planner(slots=1)
    row = [held(f"r{i}", "a", prompt_tokens=50, generated=20, expected=5) for i in range(2)]
    first, second = found._ranked(row, {each.order: 30 for each in row})
    assert (first.num_tokens, first.kv_tokens, first.running) == (60, 60, True)
    assert (second.num_tokens, second.kv_tokens, second.running) == (60, 0, False)
    assert first.expected_remaining == 5


# -- watch -------------------------------------------------------------------------------------------------------------


def test_a_watch_integrates_over_the_time_in_which_something_runs() -> None:
    clock = Clock()
    watch = Watch(clock, lambda count: 2 if count <= 2 else 4, lambda count: min(1.0, 2 / count))
    for seconds, running, load in (
        (2.0, {"a": 4, "b": 0}, {"a": 30.0, "b": 0.0}),
        (100.0, {"a": 0, "b": 0}, {"a": 0.0, "b": 0.0}),
        (6.0, {"a": 1, "b": 2}, {"a": 10.0, "b": 30.0}),
    ):
        clock.now += seconds
        watch.advance(running, load)
    watch.asked("a")
    watch.counts.update(judged=2, length=40, error=10)
    assert watch.request_seconds == {"a": 4 * 2 + 1 * 6, "b": 2 * 6}
    assert watch.tier_seconds == {"a": {4: 2 * 0.5, 2: 6.0}, "b": {2: 6.0}}
    watch.forget(["a"])
    assert (list(watch.request_seconds), list(watch.tier_seconds)) == (["b"], ["b"])
    figures = watch.take(["a", "b"])
    assert figures["busy_seconds"] == 8
    assert figures["idle_share"] == 2 / 16
    assert figures["outstanding_max_over_mean"] == pytest.approx((2 * 2 + 6 * 1.5) / 8)
    assert figures["tier_mean"] == pytest.approx((2 * 4 + 6 * 2) / 8)
    assert (figures["requests_per_replica_max"], figures["requests_per_replica_min"]) == (1, 0)
    assert figures["length_error"] == 0.25
    assert watch.take(["a", "b"]) == {}
