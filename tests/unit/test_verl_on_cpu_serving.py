"""The rollout server of verl on CPUs: requests in any order, errors, aborts and moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from equipoise.rollout.decode import DecodeConfig, DecodeEngine, sampling
from equipoise.rollout.decode import engine as engine_module
from equipoise.rollout.transfer import RequestState, Sampling
from equipoise.trainer_hooks.verl_on_cpu.serving import Answer, DecodeLoop
from tests.unit.cpu_models import VOCABULARY, model_of, one_stream


@pytest.fixture(autouse=True)
def _one_stream() -> None:
    one_stream()


def _engine() -> DecodeEngine:
    torch.set_num_threads(1)
    return DecodeEngine(model_of("qwen2", "sdpa"), DecodeConfig(tiers=(4,), num_blocks=24))


def _state(number: int, *, max_tokens: int = 12, name: str | None = None) -> RequestState:
    sampling = Sampling(seed=number, max_tokens=max_tokens)
    return RequestState(id=name or str(number), prompt=(5, 6, 7 + number), sampling=sampling)


def _alone(state: RequestState) -> RequestState:
    return _engine().generate([state])[0]


def _in_time(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def test_requests_that_come_at_any_time_are_decoded_together_and_as_alone() -> None:
    states = [_state(i, max_tokens=6 + 5 * i) for i in range(6)]

    async def work() -> list[Answer]:
        loop = DecodeLoop(_engine)
        asked: list[asyncio.Task[Answer]] = []
        for state in states:
            asked.append(asyncio.create_task(loop.submit(state)))
            await asyncio.sleep(0.004)
        return await asyncio.gather(*asked)

    for answer, state in zip(_in_time(work()), states, strict=True):
        assert (answer.state.output, answer.state.log_probs) == (_alone(state).output, _alone(state).log_probs)
        assert answer.state.finish_reason == "length"


def test_a_bad_request_fails_alone() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        bad = RequestState(id="bad", prompt=(VOCABULARY,), sampling=Sampling(max_tokens=3))
        good, wrong = await asyncio.gather(loop.submit(_state(1)), loop.submit(bad), return_exceptions=True)
        assert isinstance(good, Answer)
        assert good.state.output == _alone(_state(1)).output
        assert "hold tokens below the vocabulary of 97" in str(wrong)

    _in_time(work())


def test_an_error_reaches_every_request_and_none_of_the_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)

        def broken() -> None:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(loop.engine, "step", broken)
            results = await asyncio.gather(*(loop.submit(_state(i)) for i in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [MemoryError] * 3
        assert (await loop.submit(_state(7))).state.output == _alone(_state(7)).output
        assert loop.engine.cache.num_free == 24

    _in_time(work())


def test_an_error_while_requests_are_taken_reaches_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)

        def broken(_states: object) -> None:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(loop.engine, "import_", broken)
            results = await asyncio.gather(*(loop.submit(_state(i)) for i in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [MemoryError] * 3
        assert (await loop.submit(_state(7))).state.finish_reason == "length"

    _in_time(work())


def test_an_error_in_a_step_in_which_a_request_ends_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        plain = sampling.draw

        def failing(logits: Any, how: Sampling, *tokens: Any) -> Any:
            if how.seed == 2:
                raise MemoryError("no room")
            return plain(logits, how, *tokens)

        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "draw", failing)
            asked = (loop.submit(_state(i, max_tokens=1)) for i in (1, 2))
            results = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(results[1], MemoryError)
        assert (await loop.submit(_state(7))).state.output == _alone(_state(7)).output

    _in_time(work())


@pytest.mark.parametrize("all_of_them", [False, True])
def test_whoever_takes_a_request_out_does_so_even_if_cancelled(all_of_them: bool) -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        asked = asyncio.create_task(loop.submit(_state(1, max_tokens=50), "a"))
        await _some_tokens(loop)
        taking = asyncio.create_task(loop.abort("abort") if all_of_them else loop.abort_one("a"))
        while loop.engine.num_unfinished:
            await asyncio.sleep(0)
        taking.cancel()
        assert (await asked).state.finish_reason is None
        await loop.close("sleep")

    _in_time(work())


def test_aborting_answers_a_request_whose_cache_is_on_its_way() -> None:
    async def work() -> None:
        loop, arrived = DecodeLoop(_engine), asyncio.Event()

        async def send(_state: RequestState) -> int:
            await arrived.wait()
            return 1

        asked = asyncio.create_task(loop.submit(_state(1, max_tokens=50), "a"))
        await _some_tokens(loop)
        leaving = asyncio.create_task(loop.hand_over("a", send))
        while loop.engine.num_unfinished:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await loop.abort("abort")
        assert len((await asked).state.output) >= 3
        arrived.set()
        assert await leaving

    _in_time(work())


def test_a_closed_loop_holds_requests_until_all_have_reopened_it() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        await loop.close("sleep")
        await loop.close("weights")
        held = asyncio.create_task(loop.submit(_state(1)))
        loop.reopen("sleep")
        await asyncio.sleep(0.1)
        assert not held.done()
        loop.reopen("weights")
        assert (await held).state.finish_reason == "length"

    _in_time(work())


def test_closing_waits_for_what_is_being_decoded_and_takes_nothing_new() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        running = asyncio.create_task(loop.submit(_state(1, max_tokens=40)))
        await _some_tokens(loop)
        closing = asyncio.create_task(loop.close("sleep"))
        await asyncio.sleep(0)
        late = asyncio.create_task(loop.submit(_state(2, max_tokens=1)))
        await closing
        assert loop.engine.num_unfinished == 0
        assert len((await running).state.output) == 40
        assert not late.done()
        loop.reopen("sleep")
        assert len((await late).state.output) == 1

    _in_time(work())


async def _some_tokens(loop: DecodeLoop, number: int = 3) -> None:
    while not any(len(state.output) >= number for state in loop.engine.list_requests()):
        await asyncio.sleep(0.001)


def test_aborting_hands_back_what_there_is_and_holds_the_rest() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        running = asyncio.create_task(loop.submit(_state(1, max_tokens=50)))
        await _some_tokens(loop)
        await loop.abort("abort")
        part = (await running).state
        assert part.finish_reason is None
        assert 3 <= len(part.output) < 50
        assert part.output == _alone(_state(1, max_tokens=50)).output[: len(part.output)]
        held = asyncio.create_task(loop.submit(_state(2)))
        await asyncio.sleep(0.1)
        assert not held.done()
        await loop.abort("abort", reject=True)
        assert (await held).state.output == ()
        assert (await loop.submit(_state(3))).state.output == ()  # rejected at once
        loop.resume("abort")
        assert len((await loop.submit(_state(4))).state.output) == 12

    _in_time(work())


def test_a_caller_that_is_gone_frees_its_place() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        gone = asyncio.create_task(loop.submit(_state(1, max_tokens=50)))
        await _some_tokens(loop)
        gone.cancel()
        assert (await loop.submit(_state(2, max_tokens=2))).state.finish_reason == "length"
        assert loop.engine.num_unfinished == 0

    _in_time(work())


@pytest.mark.parametrize("with_cache", [False, True])
def test_one_request_goes_on_elsewhere_as_it_would_have_gone_on(with_cache: bool) -> None:
    sent: list[RequestState] = []

    async def send(state: RequestState) -> int:
        assert state.kv is not None
        sent.append(state)
        return sum(layer.nbytes for layer in state.kv)

    async def work() -> None:
        first, second = DecodeLoop(_engine), DecodeLoop(_engine)
        moving = asyncio.create_task(first.submit(_state(1, max_tokens=40), "a"))
        staying = asyncio.create_task(first.submit(_state(2, max_tokens=40), "b"))
        await _some_tokens(first, 20)  # its cache takes two blocks by now
        assert not await first.abort_one("unknown")
        assert await (first.hand_over("a", send) if with_cache else first.abort_one("a"))
        answer = await moving
        part = answer.state
        assert part.finish_reason is None
        assert len(part.output) >= 20
        assert answer.kv_bytes == (2 * 2 * 2 * 2 * 16 * 8 * 4 if with_cache else 0)  # layers, k and v, heads, blocks...
        rest = replace(part, kv=sent[0].kv, num_cached=sent[0].num_cached) if with_cache else part
        whole = (await second.submit(rest)).state
        for state, number in ((whole, 1), ((await staying).state, 2)):
            expected = _alone(_state(number, max_tokens=40))
            assert (state.output, state.log_probs) == (expected.output, expected.log_probs)
        assert not await first.abort_one("a")

    _in_time(work())


def test_a_request_that_waits_is_handed_back_as_it_came() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        await loop.close("sleep")
        waiting = asyncio.create_task(loop.submit(_state(1), "a"))
        await asyncio.sleep(0.01)
        assert await loop.abort_one("a")
        assert (await waiting).state.output == ()

    _in_time(work())


def test_a_cache_without_room_is_computed_again() -> None:
    async def work() -> None:
        loop = DecodeLoop(_engine)
        donor = _engine()
        donor.import_([_state(9, max_tokens=30)])
        for _ in range(5):
            donor.step()
        (moving,) = donor.export(["9"])
        assert moving.kv is not None
        moving = replace(moving, kv=list(moving.kv))
        others = [asyncio.create_task(loop.submit(_state(i, max_tokens=20))) for i in range(4)]  # all slots
        await _some_tokens(loop)
        assert (await loop.submit(moving)).state.output == _alone(_state(9, max_tokens=30)).output
        await asyncio.gather(*others)

    _in_time(work())
