"""Which requests the router of verl's rollout servers moves, and what it says that saved."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.trainer_hooks.on_verl.router.actor import TokenAwareRouter
from equipoise.trainer_hooks.on_verl.router.replay import Stay
from tests.unit.router_sim import Clock, Replica, answer, ask, prompt_of, routed


def crowded(server: Any = Replica, **config: Any) -> tuple[TokenAwareRouter, Clock, list[str]]:
    """Six requests of long responses on s0, none on s1 any more, and a decode step of 10 ms."""
    clock = Clock()
    settings = {"transfer": "recompute", "tiers": [8, 4, 2, 1], "check_interval": 5, **config}
    router = routed(2, clock, server, **settings)
    for i in range(4):
        server = ask(router, f"known {i}", 100)
        clock.now += 4.0
        answer(router, f"known {i}", server, 400)
    at = {f"r{i}": ask(router, f"r{i}", i) for i in range(12)}
    for request, server in at.items():
        if server == "s1":
            router.release_server(server, request)
            router.report(request, 0, aborted=False)
    router.take_metrics()
    return router, clock, [request for request, server in at.items() if server == "s0"]


def told(router: TokenAwareRouter, server: str = "s0") -> list[str]:
    return router._servers[server].told_to_go


@pytest.mark.parametrize("max_prompts", [65536, 1])
def test_requests_move_from_the_crowded_replica_to_the_idle_one(max_prompts: int) -> None:
    router, clock, requests = crowded(max_prompts=max_prompts)
    clock.now += 1.0
    wait_s = router.check()
    assert wait_s == pytest.approx(0.05)  # five steps
    leaving = list(told(router))
    assert len(leaving) == 2  # no fewer fit the tier of 4
    assert set(leaving) < set(requests)
    clock.now += 0.01
    for request in leaving:
        router.release_server("s0", request)
    for request in leaving:
        assert router.report(request, 90, aborted=True)
        assert ask(router, request, [*prompt_of(0), *[0] * 90]) == "s1"
    assert router.get_status()["servers"] == {"s0": 4, "s1": 2}
    clock.now += 1.0
    router.check()
    assert told(router) == leaving  # nothing more to gain
    for request in requests:
        answer(router, request, "s1" if request in leaving else "s0", 300)
    figures = router.take_metrics()
    assert figures["equipoise/rollout/moves"] == figures["equipoise/rollout/moves_planned"] == 2
    assert figures["equipoise/rollout/moved_tokens"] == 2 * (len(prompt_of(0)) + 90)
    assert figures["equipoise/rollout/predicted_saved_seconds"] > 0
    assert 0 < figures["equipoise/rollout/idle_share"] < 0.5  # s1 was idle half of the time before the move
    assert router.get_status()["outstanding_tokens"] == {"s0": 0, "s1": 0}


@pytest.mark.parametrize("config", [{"min_gain": 1e4}, {"transfer": "none"}, {"tiers": [8]}])
def test_nothing_moves_where_it_does_not_pay(config: dict[str, Any]) -> None:
    router, clock, _ = crowded_with(config)
    for _ in range(3):
        clock.now += 1.0
        router.check()
    assert told(router) == []


def crowded_with(config: dict[str, Any]) -> tuple[TokenAwareRouter, Clock, list[str]]:
    router, clock, requests = crowded()
    settings = {"tiers": [8, 4, 2, 1], "check_interval": 5, **config}
    changed = TokenAwareRouter(router._servers, {"response_length": 1000, **settings}, clock=clock)
    for name in ("_ledger", "_conversations", "_lengths", "_watch"):
        setattr(changed, name, getattr(router, name))
    changed._planner.measured(tokens=400, seconds=4.0, beside=1)
    return changed, clock, requests


def test_a_replica_that_keeps_its_requests_is_not_asked_again() -> None:
    router, clock, requests = crowded()
    clock.now += 1.0
    router.check()
    leaving = list(told(router))
    for _ in range(60):
        clock.now += 0.1
        router.check()
    assert max(Counter(told(router)).values()) == 1  # others are, once
    assert set(leaving) < set(told(router)) <= set(requests)
    assert router.take_metrics()["equipoise/rollout/moves_refused"] >= 2
    assert router.get_status()["servers"] == {"s0": 6, "s1": 0}
    for request in leaving:  # they let go after all: the response would be cut off, so it is asked for again
        router.release_server("s0", request)
        assert router.report(request, 5, aborted=True)


def test_an_aborted_request_whose_new_replica_is_gone_is_asked_for_again() -> None:
    router, clock, _ = crowded()
    clock.now += 1.0
    router.check()
    request = told(router)[0]
    router.remove_servers(["s1"])
    router.release_server("s0", request)
    assert router.report(request, 5, aborted=True)
    assert ask(router, request, [1] * 60) == "s0"
    router.release_server("s0", request)
    assert not router.report(request, 5, aborted=True)  # verl's own abort: verl decides


def due(router: TokenAwareRouter, clock: Clock) -> list[str]:
    """Requests that are told to leave s0 by a check that is due."""
    clock.now += 1.0
    before = len(told(router))
    router.check()
    return told(router)[before:]


def leave(router: TokenAwareRouter, request: str, *, tokens: int = 10) -> str:
    """The request leaves s0 unfinished and is asked for again; where it goes."""
    router.release_server("s0", request)
    assert router.report(request, tokens, aborted=True)
    return ask(router, request, [1] * 60)


def test_a_check_is_due_once_in_an_interval() -> None:
    router, clock, _ = crowded()
    assert len(due(router, clock)) == 2
    clock.now += 0.02
    assert router.check() == pytest.approx(0.03)
    assert routed(2).check() is None  # transfer=none
    assert routed(2, transfer="recompute").check() == 0.2  # no step has been measured


def test_the_first_check_is_due_as_soon_as_a_step_was_measured() -> None:
    clock = Clock()
    router = routed(2, clock, transfer="recompute", check_interval=20)
    server = ask(router, "r")
    clock.now += 0.5
    answer(router, "r", server, 10)
    assert router.check() == pytest.approx(20 * 0.05)


def test_nothing_more_moves_until_those_that_were_told_have_left() -> None:
    router, clock, _ = crowded()
    (first, second) = due(router, clock)
    clock.now += 0.06
    router.check()
    leave(router, first)
    clock.now += 0.06
    router.check()
    assert told(router) == [first, second]


def test_a_request_that_finishes_although_it_was_told_to_leave_holds_up_nothing() -> None:
    router, clock, _ = crowded()
    first, second = due(router, clock)
    leave(router, first)
    answer(router, second, "s0", 50)
    assert second not in router._conversations.busy
    clock.now += 100.0
    router.check()
    figures = router.take_metrics()
    assert (figures["equipoise/rollout/moves_planned"], figures["equipoise/rollout/moves"]) == (2, 1)
    assert figures["equipoise/rollout/moves_refused"] == 0


def test_a_request_moves_at_most_twice_in_a_turn_and_anew_in_the_next() -> None:
    router, _, _ = crowded()
    talks = router._conversations
    (request,) = due(router, router._clock)[:1]  # type: ignore[arg-type]
    leave(router, request)
    assert talks.busy[request].moves == 1
    assert router._planner._gaps  # how long it was on no replica
    answer(router, request, "s1", 20)
    talk = talks.get(request)
    assert talk is not None
    assert (talk.moves, talk.turn, talk.generated) == (0, 1, 0)


def test_a_request_whose_replica_has_failed_is_placed_as_any_other() -> None:
    router, clock, _ = crowded()
    request = due(router, clock)[0]
    router.remove_servers(["s0"])
    router.add_servers({"s2": Replica("s2")})
    ask(router, "other", 5)
    ask(router, request, 6)
    figures = router.take_metrics()
    assert figures["equipoise/rollout/moves"] == 0
    clock.now += 100.0
    router.check()
    assert router.take_metrics()["equipoise/rollout/moves_refused"] == 0


def test_one_of_two_requests_under_the_same_id_does_not_move() -> None:
    usual = due(*crowded()[:2])
    router, clock, _ = crowded()
    ask(router, usual[0], [1])
    assert usual[0] not in due(router, clock)
    assert len(told(router)) > 0


def test_a_second_request_under_the_same_id_does_not_take_the_place_of_the_one_that_moves() -> None:
    router, clock, _ = crowded()
    request = due(router, clock)[0]
    ask(router, request, 5)
    assert request in router._leaving
    assert router.take_metrics()["equipoise/rollout/moves"] == 0


def test_only_replicas_that_can_release_a_single_request_are_told_to() -> None:
    router, clock, _ = crowded(server=object)
    clock.now += 1.0
    router.check()
    assert router.take_metrics()["equipoise/rollout/moves_planned"] == 0


class Sender(Replica):
    """A replica that sends a cache before it lets a request go."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent: list[tuple[str, Any]] = []

    @property
    def hand_over_request(self) -> Any:
        def remote(request: str, receiver: Any) -> None:
            self.sent.append((request, receiver))

        return SimpleNamespace(remote=remote)


def test_with_kv_the_replica_is_told_where_to_send_the_cache() -> None:
    router, clock, _ = crowded(server=Sender, transfer="kv")
    assert due(router, clock) == []  # none is aborted
    sender = router._servers["s0"]
    assert [receiver for _, receiver in sender.sent] == [router._servers["s1"]] * 2
    request = sender.sent[0][0]
    router.release_server("s0", request)
    assert router.report(request, 5, aborted=True, kv_bytes=640)
    assert router.take_metrics()["equipoise/rollout/kv_bytes"] == 640


def test_a_replica_that_keeps_requests_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    router, clock, _ = crowded()
    for _ in range(30):
        due(router, clock)
    assert caplog.text.count("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION") == 1


def test_a_request_whose_client_is_gone_is_forgotten_once_it_is_overdue() -> None:
    router, clock, requests = crowded(max_prompts=1)
    request = due(router, clock)[0]
    router.release_server("s0", request)
    assert request in router._conversations.busy
    clock.now += 100.0
    router.check()
    assert request not in router._conversations.busy
    assert set(router._conversations.busy) == set(requests) - {request}


def test_figures_of_moves_belong_to_one_rollout() -> None:
    router, clock, _ = crowded()
    for request in due(router, clock):
        leave(router, request)
    clock.now += 1.0
    answer(router, told(router)[-1], "s1", 300)
    figures = router.take_metrics()
    assert figures["equipoise/rollout/predicted_saved_seconds"] > 0
    assert not router._replay._stays
    clock.now += 1.0
    figures = router.take_metrics()
    assert figures["equipoise/rollout/predicted_saved_seconds"] == 0
    assert figures["equipoise/rollout/moves"] == figures["equipoise/rollout/measured_saved_seconds"] == 0


def test_a_stay_is_measured_by_what_the_replica_did_meanwhile() -> None:
    clock = Clock()
    router = routed(1, clock, tiers=[2, 1], max_num_seqs=1)
    found: list[dict[str, float]] = []
    tiers: list[dict[int, float]] = []
    ended: list[list[int]] = []

    def measured(**stay: Any) -> None:
        found.append(stay)

    def measured_tiers(*, tier_seconds: Mapping[int, float], **_: Any) -> None:
        tiers.append(dict(tier_seconds))

    def response_ended(stays: list[Stay], **_: Any) -> None:
        ended.append([stay.tokens for stay in stays])

    router._planner.measured = measured
    router._step_times.measured = measured_tiers
    router._replay.ended = response_ended  # type: ignore[method-assign]
    ask(router, "a", 1)
    clock.now += 1.0
    ask(router, "b", 2)
    clock.now += 1.0
    answer(router, "a", "s0", 10)  # one second alone, one with b
    clock.now += 2.0
    answer(router, "b", "s0", 20)  # one second with a, two alone
    ask(router, "a", 3)
    clock.now += 1.0
    answer(router, "a", "s0", 30)
    assert [tuple(stay.values()) for stay in found] == [(10, 2.0, 1.5), (20, 3.0, 4 / 3), (30, 1.0, 1.0)]
    assert tiers == [{1: 1.0, 2: 0.5}, {1: 2.0, 2: 0.5}, {1: 1.0, 2: 0.0}]  # with one slot, two take turns
    assert ended == [[10], [20], [30]]


def test_running_requests_are_expected_to_be_shorter_as_time_goes_by() -> None:
    clock = Clock()
    router = routed(1, clock)
    answer(router, "first", ask(router, "first", 50), 400)  # took no time: no step is known
    ask(router, "second", 50)
    clock.now += 4.0
    answer(router, "second", "s0", 400)  # 10 ms a token
    ask(router, "third", 50)
    clock.now += 2.0
    ask(router, "fourth", [])  # of which all that is known are the others' 400
    assert router.get_status()["outstanding_tokens"]["s0"] == len(prompt_of(50)) + 200 + 400
    router.release_server("s0", "fourth")
    router.report("fourth", 0, aborted=False)
    router.release_server("s0", "third")
    assert not router.report("third", 250, aborted=True)  # the trainer's abort
    ask(router, "third", 50)
    assert router.get_status()["outstanding_tokens"]["s0"] == len(prompt_of(50)) + 150
    clock.now += 1.0
    assert router._correct(clock.now) == {router._ledger.of("third")[0].order: 350}
    assert router.get_status()["outstanding_tokens"]["s0"] == len(prompt_of(50)) + 50
