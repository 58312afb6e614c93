"""Requests that move between decode engines: the same bits, all or nothing."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from equipoise.errors import InvalidInput
from equipoise.rollout.transfer import RequestState, Sampling
from tests.numerics.decode_models import VOCAB, asks, engine


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("steps", [1, 9, 16, 30])
def test_a_moved_request_goes_on_bit_for_bit(steps: int, with_kv: bool) -> None:
    want = {done.id: done for done in engine().generate(asks())}
    sender, receiver = engine(), engine()
    sender.import_(asks())
    done: dict[str, RequestState] = {}
    for _ in range(steps):
        sender.step()
    moving = [state.id for state in sender.list_requests()][::2]
    states = sender.export(moving)
    assert [state.id for state in states] == moving
    assert {state.id for state in sender.list_requests()} >= set(moving), "export only reads"
    receiver.import_([state if with_kv else replace(state, kv=None, num_cached=0) for state in states])
    sender.abort(moving)
    for one in (sender, receiver):
        while one.num_unfinished:
            one.step()
        done |= {state.id: state for state in one.take_finished()}
    assert {name: state.output for name, state in done.items()} == {n: s.output for n, s in want.items()}
    assert {name: state.log_probs for name, state in done.items()} == {n: s.log_probs for n, s in want.items()}
    assert sender.cache.num_free == receiver.cache.num_free == 128


def test_caches_written_layer_by_layer_are_those_of_the_sender() -> None:
    want = {done.id: done.output for done in engine().generate(asks())}
    sender, receiver = engine(), engine()
    sender.import_(asks())
    for _ in range(4):
        sender.step()
    states = sender.export([state.id for state in sender.list_requests()][:5])
    receiver.reserve([replace(state, kv=None) for state in states])
    assert (receiver.num_unfinished, receiver.list_requests()) == (0, [])
    assert receiver.facts().free_blocks < 128, "blocks are held before a request runs"
    names, caches = [state.id for state in states], [state.kv for state in states if state.kv is not None]
    for layer in range(2):
        receiver.write(layer, names, torch.cat([kv[layer] for kv in caches], dim=2))
    assert receiver.step() is None
    receiver.commit(names)
    done: dict[str, RequestState] = {}
    while receiver.num_unfinished:
        report = receiver.step()
        assert report is not None
        assert report.prefilled_tokens == 0
        done |= {state.id: state for state in receiver.take_finished()}
    assert {name: state.output for name, state in done.items()} == {name: want[name] for name in names}


def test_reserved_requests_hold_their_slots_and_are_forgotten_on_demand() -> None:
    sender, receiver = engine(), engine(tiers=(4,))
    sender.import_(asks(3))
    sender.step()
    running = [replace(state, kv=None) for state in sender.export(["0", "1", "2"])]
    receiver.import_([replace(asked, id=f"mine {asked.id}") for asked in asks(3)])
    receiver.reserve(running)
    receiver.step()
    assert sum(state.num_cached > 0 for state in receiver.list_requests()) == 1, "three of four slots are held"
    with pytest.raises(InvalidInput, match="'0'"):
        receiver.reserve(running[:1])
    for ids, content in ((["0"], torch.zeros(2, 2, 9, 8, 12)), (["nobody"], torch.zeros(2, 2, 1, 8, 12))):
        with pytest.raises(InvalidInput, match=ids[0]):
            receiver.write(0, ids, content)
    with pytest.raises(InvalidInput, match="nobody"):
        receiver.commit(["0", "nobody"])
    receiver.abort(["0", "1", "2"])
    while receiver.num_unfinished:
        receiver.step()
    assert receiver.cache.num_free == 128
    receiver.reserve(running)
    receiver.clear()
    assert (receiver.cache.num_free, receiver.num_unfinished, receiver.take_finished()) == (128, 0, [])


def test_import_gives_back_what_it_held_when_a_layer_fails() -> None:
    sender, receiver = engine(), engine()
    sender.import_(asks(2))
    sender.step()
    states = sender.export(["0", "1"])
    assert states[1].kv is not None
    broken = [states[1].kv[0], states[1].kv[1][:, :, :, :4]]
    with pytest.raises(InvalidInput, match="'1'"):
        receiver.import_([states[0], replace(states[1], kv=broken)])
    assert (receiver.cache.num_free, receiver.num_unfinished) == (128, 0)
    receiver.import_(states)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "0"}, "request '0'"),
        ({"prompt": (VOCAB,)}, "'bad'.*61.*61"),
        ({"sampling": Sampling(max_tokens=300)}, "'bad'.*256.*301"),
        (
            {"kv": [torch.zeros(2, 2, 1, 8, 12)], "num_cached": 1, "output": (1,), "log_probs": (0.0,)},
            "2 layers, got 1",
        ),
        ({"kv": [torch.zeros(2, 2, 1, 8, 12)] * 2, "num_cached": 1}, "'bad'.*1"),
        ({"finish_reason": "stop"}, "'bad'.*'stop'"),
    ],
)
def test_import_takes_all_or_nothing(change: dict[str, Any], words: str) -> None:
    made = engine()
    made.import_(asks(3))
    bad = replace(RequestState(id="bad", prompt=(1,), sampling=Sampling()), **change)
    with pytest.raises(InvalidInput, match=words):
        made.import_([replace(asks(1)[0], id="good"), bad])
    assert [state.id for state in made.list_requests()] == ["0", "1", "2"]
    assert made.cache.num_free == 128


def test_import_needs_slots_and_blocks_for_what_runs() -> None:
    sender, small = engine(), engine(num_blocks=32)
    sender.import_(asks())
    for _ in range(4):
        sender.step()
    states = sender.export([state.id for state in sender.list_requests()])
    with pytest.raises(InvalidInput, match=r"16.*32"):
        small.import_(states)
    assert (small.num_unfinished, small.cache.num_free) == (0, 32)


def test_abort_forgets_all_or_nothing() -> None:
    made = engine()
    made.import_(asks(3))
    made.step()
    with pytest.raises(InvalidInput, match=r"request id.*'nobody'"):
        made.abort(["0", "nobody"])
    assert made.num_unfinished == 3
    made.abort(["0", "1", "2"])
    assert (made.num_unfinished, made.cache.num_free) == (0, 128)
