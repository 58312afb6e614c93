"""Decoding: the tokens of the whole forward, with the same bits in any batch."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.errors import InvalidInput
from equipoise.rollout.decode import DecodeEngine, proof
from equipoise.rollout.transfer import RequestState, Sampling
from tests.numerics.decode_models import KINDS, asks, engine, model


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_tokens_and_log_probs_are_those_of_the_whole_forward(kind: str) -> None:
    reference = model(kind, torch.float64)
    for asked, done in zip(
        asks(8, greedy=True), engine(copy.deepcopy(reference)).generate(asks(8, greedy=True)), strict=True
    ):
        with torch.no_grad():
            logits = reference(torch.tensor([done.tokens])).logits[0, len(asked.prompt) - 1 : -1]
        want = torch.log_softmax(logits, -1)
        assert done.output == tuple(logits.argmax(-1).tolist())
        picked = want[torch.arange(len(done.output)), list(done.output)]
        assert torch.allclose(torch.tensor(done.log_probs, dtype=torch.float64), picked, atol=1e-10, rtol=0)
        assert (len(done.output), done.finish_reason) == (asked.sampling.max_tokens, "length")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen2", torch.float32), ("llama", torch.float32), ("llama", torch.bfloat16), ("qwen3", torch.float64)],
)
def test_company_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    made = engine(model(kind, dtype), tiers=(16, 8, 4, 2, 1))
    together = made.generate(asks())
    assert [made.generate([asked])[0] for asked in asks()] == together
    assert made.generate(asks()[::-1]) == together[::-1]
    assert len({token for done in together for token in done.output}) > 20, "outputs vary enough to tell"
    assert made.cache.num_free == 128


def test_one_decode_shape_gives_the_same_and_says_its_tier() -> None:
    made, fixed = engine(), engine(multi_graph=False)
    assert fixed.generate(asks()) == made.generate(asks())
    for one, tier in ((made, 4), (fixed, 16)):
        one.import_(asks(2))
        report = one.step()
        assert report is not None
        assert (report.tier, report.num_running) == (tier, 2)


def test_a_step_tells_what_it_prefilled() -> None:
    made = engine()
    made.import_(asks(3))
    first, second = made.step(), made.step()
    assert first is not None
    assert second is not None
    assert first.prefilled_tokens == sum(len(asked.prompt) - 1 for asked in asks(3))
    assert first.prefill_seconds > 0
    assert (second.prefilled_tokens, second.prefill_seconds) == (0, 0.0)


def test_tokens_of_another_kind_are_refused() -> None:
    made = engine()
    for prompt in (("a", 1), (1.5,), (np.int64(3),)):
        with pytest.raises(InvalidInput, match="request 'a'"):
            made.import_([RequestState(id="a", prompt=prompt, sampling=Sampling())])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"model.*.str"):
        DecodeEngine("a/model")


def test_a_cache_of_no_token_is_no_cache() -> None:
    made = engine()
    asked = RequestState(id="a", prompt=(5,), sampling=Sampling(max_tokens=4))
    empty = torch.zeros(2, 2, 0, 8, 12)
    made.import_(asks(16))
    made.step()  # all slots are taken: a cache would have no place
    made.import_([replace(asked, kv=[empty] * 2)])
    while made.num_unfinished:
        made.step()
    assert {done.id: done for done in made.take_finished()}["a"].output == engine().generate([asked])[0].output


def test_prefills_in_a_larger_shape_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wide = engine(), engine(prefill_rows=64)
    assert wide.passes.sizes == plain.passes.sizes == (4, 8, 16)
    assert (plain.passes.prefill_size, wide.passes.prefill_size) == (16, 64)
    shapes: list[tuple[int, bool]] = []
    forward = wide.passes.forward

    def recording(tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append((len(tokens), args[-1]))
        return forward(tokens, *args)

    monkeypatch.setattr(wide.passes, "forward", recording)
    assert wide.generate(asks()) == plain.generate(asks())
    assert {head for size, head in shapes if size == 64} == {False}
    assert {size for size, head in shapes if head} <= {4, 8, 16}


def test_a_prefill_shape_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = proof.linear_sizes

    def others(hf: Any, sizes: Sequence[int]) -> set[int]:
        return plain(hf, sizes) - ({16} if 64 in sizes else set())

    monkeypatch.setattr(proof, "linear_sizes", others)
    made = engine(prefill_rows=64)
    assert (made.passes.sizes, made.passes.prefill_size) == ((4, 8, 16), 16)
    assert made.generate(asks(4)) == engine().generate(asks(4))


def test_a_full_pool_makes_the_youngest_wait_and_changes_no_bit() -> None:
    want = engine().generate(asks())
    tight = engine(num_blocks=15)
    seen: list[int] = []
    tight.import_(asks())
    done: dict[str, RequestState] = {}
    while tight.num_unfinished:
        tight.step()
        seen.append(len(tight._running))
        done |= {state.id: state for state in tight.take_finished()}
    assert [done[asked.id] for asked in asks()] == want
    assert min(seen[:-10]) < max(seen) < 8
    assert tight.cache.num_free == 15


def test_a_cache_that_is_computed_again_has_the_bits_of_the_first() -> None:
    made, other = engine(), engine()
    made.import_(asks())
    for _ in range(20):
        made.step()
    states = made.export([state.id for state in made.list_requests() if state.num_cached])
    other.import_([replace(state, kv=None, num_cached=0) for state in states])
    other._admit()
    again = other.export([state.id for state in states])
    compared = 0
    for state, twin in zip(states, again, strict=True):
        assert state.kv is not None
        assert twin.kv is not None
        for layer in range(2):
            mine, theirs = (kv[layer].flatten(2, 3)[:, :, : state.num_cached] for kv in (state.kv, twin.kv))
            assert torch.equal(mine, theirs)
            compared += int(mine.count_nonzero())
    assert compared > 10_000


def test_what_an_earlier_request_left_does_not_reach_a_later_one() -> None:
    want = engine().generate(asks())
    dirty = engine()
    for pool in dirty.cache.pools:
        pool[:, :, 2:] = torch.nan
    assert dirty.generate(asks()) == want
