"""An exchange as one of two ranks sees it; what the other rank does is scripted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import pytest
import torch

from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import RequestState, wire
from equipoise.rollout.transfer.caches import IN_FLIGHT, take_in
from equipoise.rollout.transfer.channel import Channel
from equipoise.rollout.transfer.exchange import Exchanged, exchange
from equipoise.rollout.transfer.wire import Row, Table
from equipoise.together import RankFailed
from tests.toy_engine import LAYOUT, ToyEngine, answer, cache_of, request

T = TypeVar("T")
MEETINGS = ("sending requests", "holding room for requests", "taking requests in", "forgetting requests that were sent")


class OneSide:
    """The channel of one of two ranks.

    Args:
        rank: of the two.
        message: that the other rank sends.
        layers: contents that the other rank sends, in order.
        other_fails: the meeting in which the other rank fails.
    """

    world_size = 2
    device = torch.device("cpu")

    def __init__(
        self, rank: int, *, message: bytes = b"", layers: Sequence[torch.Tensor] = (), other_fails: str = ""
    ) -> None:
        self.rank, self.message, self.layers, self.other_fails = rank, message, list(layers), other_fails
        self.met: list[str] = []
        self.sent: list[list[torch.Tensor]] = []
        self.flying, self.most_flying = 0, 0
        self.buffers: dict[int, int] = {}

    def together(self, part: Callable[[], T], doing: str) -> T:
        self.met.append(doing)
        result = part()
        if doing == self.other_fails:
            raise RankFailed(f"rank {1 - self.rank} failed while {doing}")
        return result

    def scatter(self, part: Callable[[], Sequence[bytes]], doing: str, *, about: object = None) -> list[bytes]:
        assert about is not None
        mine = self.together(part, doing)
        assert not mine[self.rank]
        return [self.message, b""] if self.rank else [b"", self.message]

    def start(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> Any:
        self.flying += 1
        self.most_flying = max(self.most_flying, self.flying)
        for _, tensor in (*sends, *receives):
            self.buffers[tensor.data_ptr()] = tensor.nbytes
        self.sent.append([tensor.clone() for _, tensor in sends])
        return [tensor for _, tensor in receives]

    def finish(self, works: Sequence[torch.Tensor]) -> None:
        self.flying -= 1
        for tensor in works:
            tensor.copy_(self.layers.pop(0))


def tables_of(*engines: ToyEngine) -> list[Table]:
    found: list[Table] = []
    for engine in engines:
        rows = [
            Row(
                id=state.id,
                home=state.home,
                prompt=0,
                num_tokens=state.num_tokens,
                num_output=len(state.output),
                num_cached=state.num_cached,
                running=state.num_cached > 0,
                max_remaining=1,
            )
            for state in engine.list_requests()
        ]
        found.append(Table(facts=engine.facts(), check=0, settings=0, rows=tuple(rows)))
    return found


def begun() -> ToyEngine:
    """Rank 0's engine: of its requests "a" and "b" decode, and "waits" waits."""
    engine = ToyEngine()
    engine.waiting = {name: request(name, 9, seed=seed) for seed, name in enumerate("abc")}
    for _ in range(4):
        engine.step()
    engine.waiting["waits"] = request("waits", 3, seed=8)
    return engine


MOVES = [Move(0, 1, "b"), Move(0, 1, "waits"), Move(0, 1, "a"), Move(0, 1, "c")]


def run(engine: ToyEngine, side: OneSide, tables: list[Table], transfer: str = "kv") -> Exchanged:
    return exchange(engine, cast("Channel", side), tables, MOVES, transfer=transfer)


def receiver(**script: Any) -> tuple[ToyEngine, OneSide, list[Table]]:
    sender, engine = begun(), ToyEngine()
    states = sender.export(["b", "waits", "a", "c"])
    kept: list[RequestState] = script.pop("states", states)
    caches = [state.kv for state in states if state.kv is not None]
    layers = [torch.cat([kv[layer] for kv in caches], dim=2) for layer in range(LAYOUT.num_layers)]
    return engine, OneSide(1, message=wire.pack_states(kept), layers=layers, **script), tables_of(sender, engine)


def test_requests_go_on_with_the_caches_that_came() -> None:
    engine, side, tables = receiver()
    done = run(engine, side, tables)
    assert (done.num_moved, done.refused) == (4, "")
    assert done.kv_bytes == 3 * LAYOUT.nbytes(6)
    assert 0 < done.seconds < 60
    assert (list(engine.running), list(engine.waiting), engine.reserved) == (["b", "a", "c"], ["waits"], {})
    while engine.step():
        pass
    asked = [*(request(name, 9, seed=seed) for seed, name in enumerate("abc")), request("waits", 3, seed=8)]
    assert {state.id: state.output for state in engine.take_finished()} == {each.id: answer(each) for each in asked}
    assert tuple(side.met) == MEETINGS


def test_without_caches_requests_wait_for_their_prefill() -> None:
    engine, side, tables = receiver(
        states=[replace(state, kv=None) for state in begun().export(["b", "waits", "a", "c"])]
    )
    assert run(engine, side, tables, "recompute").kv_bytes == 0
    assert (engine.running, list(engine.waiting)) == ({}, ["b", "waits", "a", "c"])
    assert side.most_flying == 0


def test_the_caches_are_sent_layer_by_layer() -> None:
    engine, side = begun(), OneSide(0)
    whole = {name: engine.running[name].tokens[:-1] for name in "bac"}
    run(engine, side, tables_of(engine, ToyEngine()))
    assert len(side.sent) == LAYOUT.num_layers
    for layer, (content,) in enumerate(side.sent):
        assert torch.equal(content, torch.cat([cache_of(tokens)[layer] for tokens in whole.values()], dim=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_no_more_than_the_layers_in_flight_are_held_beside_the_pools(rank: int) -> None:
    engine, side, tables = receiver() if rank else (begun(), OneSide(0), tables_of(begun(), ToyEngine()))
    assert LAYOUT.num_layers > IN_FLIGHT
    run(engine, side, tables)
    assert side.most_flying == len(side.buffers) == IN_FLIGHT
    assert sum(side.buffers.values()) * LAYOUT.num_layers == 3 * LAYOUT.nbytes(6) * IN_FLIGHT


@pytest.mark.parametrize("meeting", MEETINGS[:3])
def test_what_came_is_forgotten_when_another_rank_fails(meeting: str) -> None:
    engine, side, tables = receiver(other_fails=meeting)
    before = engine.facts()
    done = run(engine, side, tables)
    assert done.num_moved == 0
    assert 0 < done.seconds < 60
    assert f"rank 0 failed while {meeting}" in done.refused
    assert engine.is_empty
    assert engine.facts() == before
    assert side.met[-1] not in MEETINGS


@pytest.mark.parametrize("meeting", MEETINGS[:3])
def test_what_was_sent_stays_when_another_rank_fails(meeting: str) -> None:
    engine, side = begun(), OneSide(0, other_fails=meeting)
    before = engine.list_requests()
    assert meeting in run(engine, side, tables_of(engine, ToyEngine())).refused
    assert engine.list_requests() == before


def test_what_was_sent_is_forgotten_once_all_agree() -> None:
    engine, side = begun(), OneSide(0)
    held: list[int] = []
    meet = side.together
    side.together = lambda part, doing: (held.append(len(engine.list_requests())), meet(part, doing))[1]  # type: ignore[method-assign]
    run(engine, side, tables_of(engine, ToyEngine()))
    assert held == [4, 4, 4, 4]
    assert engine.is_empty


def test_a_receiver_that_fails_amid_the_layers_takes_the_rest_and_keeps_nothing() -> None:
    engine, side, tables = receiver()
    writes: list[int] = []

    def write(layer: int, *_: Any) -> None:
        writes.append(layer)
        assert layer < 1, "out of memory"

    engine.write = write  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="out of memory"):
        run(engine, side, tables)
    assert writes == [0, 1], "nothing more is written"
    assert side.layers == [], "but all is received"
    assert engine.is_empty


def test_an_engine_that_cannot_fill_a_cache_in_keeps_no_room_for_it() -> None:
    engine: Any = ToyEngine()
    before = engine.facts()

    def write(layer: int, *_: Any) -> None:
        assert layer < 1, "out of memory"

    engine.write = write
    with pytest.raises(AssertionError, match="out of memory"):
        take_in(engine, begun().export(["a", "waits"]))
    assert engine.is_empty
    assert engine.facts() == before


CHANGES: list[dict[str, Any]] = [
    {"home": 1},
    {"output": (1, 2, 3), "log_probs": (0.0,) * 3},
    {"num_cached": 5},
    {"kv": None},
    {"id": "z"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_request_other_than_the_table_told_is_refused(change: dict[str, Any]) -> None:
    states = begun().export(["b", "waits", "a", "c"])
    engine, side, tables = receiver(states=[replace(states[0], **change), *states[1:]])
    done = run(engine, side, tables)
    assert "b" in done.refused
    assert engine.is_empty


def test_no_moves_take_no_time_and_no_meeting() -> None:
    side = OneSide(0)
    done = exchange(ToyEngine(), cast("Channel", side), tables_of(ToyEngine(), ToyEngine()), [], transfer="kv")
    assert (done.num_moved, done.kv_bytes, done.seconds, side.met) == (0, 0, 0.0, [])


def test_a_sender_that_leaves_a_request_out_is_refused() -> None:
    engine, side, tables = receiver(states=begun().export(["b", "waits", "a"]))
    assert run(engine, side, tables).num_moved == 0
    assert engine.is_empty
