"""The rollout server of a CPU run, without Ray around it."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM

from equipoise.errors import InvalidInput
from equipoise.trainer_hooks.on_verl.router.protocol import GENERATED_KEY, KV_BYTES_KEY
from equipoise.trainer_hooks.verl_on_cpu.patches import STREAM_KEY
from equipoise.trainer_hooks.verl_on_cpu.request import Limits, read_request
from equipoise.trainer_hooks.verl_on_cpu.server import HFCPUServer, Parked

LIMIT = 60
PROMPT = [5, 6, 7, 8]
PARAMS = {"max_tokens": LIMIT, STREAM_KEY: "a"}


class Server(HFCPUServer):
    """The server with a random model in place of a loaded one."""

    def __init__(self, *, max_num_seqs: int = 4) -> None:
        limits = {"prompt_length": 40, "response_length": LIMIT, "max_num_seqs": max_num_seqs}
        self._start(OmegaConf.create({"seed": 3, **limits}), _model, ())
        self.kept: list[int] = []

    async def take_in(self, tokens: list[int], parked: Parked) -> bool:
        self.kept.append(parked.num_cached)
        return await super().take_in(tokens, parked)


class Handle:
    """What a sender calls of its receiver, as through Ray."""

    def __init__(self, take_in: Callable[..., Any]) -> None:
        self.take_in = self
        self.remote = take_in


def _model() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=97, hidden_size=32, intermediate_size=48, **shape))


async def _interrupted(server: Server, handle: Handle, *, at: int = 20) -> Any:
    """The first part of a response that leaves ``server`` after some tokens."""
    asked = asyncio.create_task(server.generate("talk", PROMPT, PARAMS))
    while not any(len(state.output) >= at for state in server.loop.engine.list_requests()):
        await asyncio.sleep(0.001)
    assert await server.hand_over_request("talk", handle)
    return await asked


async def _rest(server: Server, part: Any) -> Any:
    done = len(part.token_ids)
    params = {**PARAMS, "max_tokens": LIMIT - done, GENERATED_KEY: done}
    return await server.generate("talk", PROMPT + part.token_ids, params)


async def _whole() -> Any:
    return await Server().generate("talk", PROMPT, PARAMS)


def test_a_request_goes_on_with_the_cache_that_was_sent() -> None:
    async def work() -> None:
        first, second = Server(), Server()
        part = await _interrupted(first, Handle(second.take_in))
        assert part.stop_reason == "aborted"
        blocks = -(-second.kept[0] // 16)
        assert part.extra_fields[KV_BYTES_KEY] == 2 * 2 * 2 * blocks * 16 * 8 * 4
        passes: list[int] = []
        run = second.loop.engine.passes.run

        def counting(rows: Any, *, size: int, head: bool) -> Any:
            passes.append(len(rows))
            return run(rows, size=size, head=head)

        second.loop.engine.passes.run = counting  # type: ignore[method-assign]
        rest = await _rest(second, part)
        assert passes == [1] * len(rest.token_ids)  # nothing was prefilled
        whole = await _whole()
        assert part.token_ids + rest.token_ids == whole.token_ids
        assert part.log_probs + rest.log_probs == whole.log_probs

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("error", [ConnectionError("gone"), KeyError("gone"), asyncio.TimeoutError("gone")])
def test_whatever_fails_at_the_receiver_costs_a_prefill_and_no_request(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: object) -> bool:
        raise error

    async def work() -> None:
        part = await _interrupted(Server(), Handle(fails))
        assert KV_BYTES_KEY not in part.extra_fields
        rest = await _rest(Server(), part)
        assert part.token_ids + rest.token_ids == (await _whole()).token_ids

    with caplog.at_level(logging.WARNING, logger="equipoise"):
        asyncio.run(asyncio.wait_for(work(), 60))
    assert repr(error) in caplog.text


def test_a_cache_of_other_weights_is_refused_and_one_of_old_weights_dropped() -> None:
    async def work() -> None:
        first, second, third = Server(), Server(), Server()
        weights = {name: parameter.detach().numpy() * 1.5 for name, parameter in first.model.named_parameters()}
        await second.update_weights(weights, last=True, global_steps=1)
        part = await _interrupted(first, Handle(second.take_in))
        assert KV_BYTES_KEY not in part.extra_fields
        part = await _interrupted(first, Handle(third.take_in))
        assert part.extra_fields[KV_BYTES_KEY] > 0
        await third.update_weights(weights, last=True, global_steps=1)
        assert not third._parked  # pyright: ignore[reportPrivateUsage]
        assert (await _rest(third, part)).token_ids == (await _rest(second, part)).token_ids

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_cache_that_waits_for_its_turn_does_not_outlive_its_weights() -> None:
    async def work() -> None:
        first, second, third = Server(), Server(), Server()
        second.config.free_cache_engine = True
        weights = {name: parameter.detach().numpy() * 1.5 for name, parameter in first.model.named_parameters()}
        part = await _interrupted(first, Handle(second.take_in))
        assert part.extra_fields[KV_BYTES_KEY] > 0
        await second.sleep()
        asked = asyncio.create_task(_rest(second, part))
        await asyncio.sleep(0.05)
        for server in (second, third):
            await server.update_weights(weights, last=True, global_steps=2)
        await second.wake_up()
        got, want = await asked, await _rest(third, part)
        assert (got.token_ids, got.log_probs) == (want.token_ids, want.log_probs)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_weights_come_in_parts_and_are_complete_or_refused() -> None:
    async def work() -> None:
        server = Server()
        names = [name for name, _ in server.model.named_parameters()]
        weights = {name: torch.zeros_like(server.model.get_parameter(name)).numpy() for name in names}
        await server.update_weights({names[0]: weights[names[0]]}, last=False, global_steps=None)
        held = asyncio.create_task(server.generate("talk", PROMPT, PARAMS))
        await asyncio.sleep(0.05)
        assert not held.done()
        with pytest.raises(InvalidInput, match=r"weights.*'missing': \['"):
            await server.update_weights({}, last=True, global_steps=7)
        await server.update_weights(weights, last=True, global_steps=7)
        done = await held
        assert done.extra_fields["global_steps"] == 7
        assert done.log_probs == pytest.approx([-torch.tensor(97.0).log().item()] * LIMIT)  # of a model of zeros
        with pytest.raises(InvalidInput, match=r"weights.*'unknown': \['lm_heed'"):
            await server.update_weights({"lm_heed": weights[names[0]]}, last=False, global_steps=None)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_at_most_64_caches_wait() -> None:
    async def work() -> None:
        first, second = Server(), Server()
        await _interrupted(first, Handle(second.take_in))
        (parked,) = second._parked.values()  # pyright: ignore[reportPrivateUsage]
        for number in range(70):
            await second.take_in([number], parked)
        assert list(second._parked) == [(number,) for number in range(6, 70)]  # pyright: ignore[reportPrivateUsage]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_server_goes_on_with_limit_and_seed_of_the_whole_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_CPU_LEN_SKEW", "1.5")
    limits = Limits(response=600, total=1000)
    for i in range(20):
        params = {"max_tokens": 500, STREAM_KEY: f"s/{i}"}
        whole = read_request([4, 5], params, name="a", seed=1, limits=limits, stream="")
        done = whole.sampling.max_tokens // 2
        rest = {"max_tokens": 500 - done, STREAM_KEY: f"s/{i}", GENERATED_KEY: done}
        found = read_request([4, 5, *[9] * done], rest, name="a", seed=1, limits=limits, stream="")
        assert found.sampling == whole.sampling
        assert (found.prompt, found.output) == ((4, 5), (9,) * done)
