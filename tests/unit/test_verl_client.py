"""verl's client that continues moved requests, with a scripted server and router in place of Ray's actors."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from equipoise.trainer_hooks.on_verl.router.client import MovingClient, joined
from equipoise.trainer_hooks.on_verl.router.protocol import GENERATED_KEY

PROMPT = [7, 8, 9]
SIZES = {"name": "hf_cpu", "response_length": 20, "prompt_length": 10}


class Remote:
    """A method of an actor: ``handle.method.remote(...)`` is awaitable."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(self._call(*args, **kwargs))
        return future


class Rollout:
    """One server that answers from a script, and the router before it."""

    def __init__(self, *answers: TokenOutput, moves: bool = True, check_s: float | None = None) -> None:
        self.answers, self.moves, self.check_s = list(answers), moves, check_s
        self.asked: list[dict[str, Any]] = []
        self.acquired: list[dict[str, Any]] = []
        self.reports: list[tuple[int, bool, int]] = []
        self.released = self.checks = 0

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids", "server_request_id"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def acquire_server(self, **fields: Any) -> tuple[str, Any]:
        self.acquired.append(fields)
        return "s0", Handle(self)

    def release_server(self, **_: Any) -> None:
        self.released += 1

    def generate(self, **request: Any) -> TokenOutput:
        self.asked.append(request)
        return self.answers.pop(0)

    def report(self, _: str, num_tokens: int, *, aborted: bool, kv_bytes: int) -> bool:
        self.reports.append((num_tokens, aborted, kv_bytes))
        return self.moves

    def check(self) -> float | None:
        self.checks += 1
        return self.check_s


class Handle:
    def __init__(self, actor: Rollout) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Remote:
        return Remote(getattr(self._actor, name))


def part(tokens: list[int], stop_reason: str = "aborted", **fields: Any) -> TokenOutput:
    log_probs = [-float(token) for token in tokens]
    return TokenOutput(
        token_ids=tokens,
        log_probs=log_probs,
        stop_reason=stop_reason,
        num_preempted=1,
        extra_fields={"global_steps": 1, **fields},
    )


def generate(rollout: Rollout, prompt: list[int] = PROMPT, **params: Any) -> TokenOutput:
    async def work() -> TokenOutput:
        client = MovingClient(OmegaConf.create({"actor_rollout_ref": {"rollout": SIZES}}), Handle(rollout))
        output = await client.generate("talk", prompt_ids=prompt, sampling_params=params)
        assert not client._server_request_ids  # nothing is kept of a request that has ended
        return output

    return asyncio.run(asyncio.wait_for(work(), 20))


@pytest.mark.parametrize(
    ("params", "rest"),
    [
        ({"max_tokens": 12}, {"max_tokens": 9}),
        ({"max_new_tokens": 12, "top_p": 0.5}, {"max_new_tokens": 9, "top_p": 0.5}),
        ({"max_tokens": 12, GENERATED_KEY: 0}, {"max_tokens": 9, GENERATED_KEY: 3}),
        ({}, {"max_tokens": 17}),
    ],
)
def test_a_moved_response_continues_with_the_rest_of_its_limit(params: dict[str, Any], rest: dict[str, Any]) -> None:
    rollout = Rollout(part([1, 2, 3], equipoise_kv_bytes=64), part([4, 5], "completed", global_steps=2))
    given = dict(params)
    output = generate(rollout, **params)
    assert [(each["prompt_ids"], each["sampling_params"]) for each in rollout.asked] == [
        (PROMPT, given),
        ([*PROMPT, 1, 2, 3], rest),
    ]
    assert rollout.reports == [(3, True, 64), (2, False, 0)]
    assert rollout.released == 2
    assert (output.token_ids, output.stop_reason, output.num_preempted) == ([1, 2, 3, 4, 5], "completed", 2)
    assert output.log_probs == [-1, -2, -3, -4, -5]
    assert output.extra_fields == {"global_steps": 2, "min_global_steps": 1, "max_global_steps": 2}


def test_a_response_may_move_more_than_once() -> None:
    rollout = Rollout(part([1, 2]), part([3]), part([4, 5], "completed"))
    assert generate(rollout, max_tokens=9).token_ids == [1, 2, 3, 4, 5]
    assert rollout.asked[2]["prompt_ids"] == [*PROMPT, 1, 2, 3]
    assert rollout.asked[2]["sampling_params"] == {"max_tokens": 6}


def test_the_router_learns_what_the_server_calls_a_request() -> None:
    rollout = Rollout(part([1]), part([2], "completed"))
    generate(rollout)
    names = [each["server_request_id"] for each in rollout.acquired]
    assert names == [each["request_id"] for each in rollout.asked]
    assert len(set(names)) == 2
    assert [each["request_id"] for each in rollout.acquired] == ["talk", "talk"]


@pytest.mark.parametrize(("prompt", "first", "rest"), [(15, [1, 2, 3], 10 + 20 - 15 - 3), (40, [], 1)])
def test_the_default_limit_leaves_room_for_a_long_prompt(prompt: int, first: list[int], rest: int) -> None:
    rollout = Rollout(part(first), part([4], "completed"))
    generate(rollout, [7] * prompt)
    assert rollout.asked[1]["sampling_params"] == {"max_tokens": rest}


@pytest.mark.parametrize("parts", [[[1, 2, 3, 4]], [[1, 2], [3, 4]]])
def test_no_token_is_asked_for_beyond_the_limit(parts: list[list[int]]) -> None:
    """A server may abort a request whose last token it has just sampled."""
    rollout = Rollout(*(part(tokens) for tokens in parts))
    output = generate(rollout, max_tokens=4)
    assert (output.token_ids, output.stop_reason) == ([1, 2, 3, 4], "completed")
    assert [aborted for _, aborted, _ in rollout.reports] == [True] * (len(parts) - 1) + [False]


def test_a_response_without_any_token_yet_is_asked_for_again() -> None:
    rollout = Rollout(part([]), part([1], "completed"))
    assert generate(rollout, max_tokens=4).token_ids == [1]
    assert rollout.asked[1]["sampling_params"] == {"max_tokens": 4}


def test_what_the_trainer_aborts_is_returned_as_verl_returns_it() -> None:
    rollout = Rollout(part([1, 2]), moves=False)
    output = generate(rollout, max_tokens=4)
    assert (output.token_ids, output.stop_reason) == ([1, 2], "aborted")
    assert rollout.reports == [(2, True, 0)]


def test_the_router_is_asked_to_check_only_while_requests_are_open() -> None:
    async def checks(check_s: float | None) -> list[int]:
        rollout = Rollout(check_s=check_s)
        client = MovingClient(OmegaConf.create({"actor_rollout_ref": {"rollout": SIZES}}), Handle(rollout))
        gate = asyncio.Event()
        acquire = client._acquire_server

        async def held(*args: Any, **kwargs: Any) -> Any:
            await gate.wait()
            return await acquire(*args, **kwargs)

        client._acquire_server = held
        found: list[int] = []
        for _ in range(2):
            rollout.answers = [part([1], "completed"), part([1], "completed")]
            gate.clear()
            asked = [
                asyncio.create_task(client.generate(f"talk {i}", prompt_ids=PROMPT, sampling_params={}))
                for i in range(2)
            ]
            await asyncio.sleep(0.05)
            gate.set()
            await asyncio.gather(*asked)
            await asyncio.sleep(0.02)
            closed = rollout.checks
            await asyncio.sleep(0.03)
            assert rollout.checks == closed
            found.append(closed)
        return found

    assert asyncio.run(checks(None)) == [1, 1]  # nothing ever moves
    first, second = asyncio.run(checks(0.01))
    assert 2 <= first < second


def test_two_parts_become_one_response() -> None:
    first, second = part([1, 2], num_cached_tokens=3), part([3], "completed", num_cached_tokens=5)
    first.routed_experts, second.routed_experts = np.arange(4), np.arange(10, 16)  # of the prompt too
    both = joined(first, second)
    assert list(both.routed_experts) == [0, 1, 2, 3, 15]  # pyright: ignore[reportArgumentType]
    assert both.extra_fields["num_cached_tokens"] == 3  # of the prompt alone
    first.log_probs = second.log_probs = None
    assert joined(first, second).log_probs is None
    second.token_ids = []
    assert joined(first, second).routed_experts is first.routed_experts
