"""Clients of verl's rollout servers that also report lengths and continue requests that move.

verl 0.9.1 (verl/workers/rollout/llm_server.py) tells its router that a request has left a server, but not how long the
response was, and its synchronous client returns an aborted response as if it were complete. A move is verl's own
abort-and-continue for a single request: the router has the server abort it, the client asks again with what was
generated so far, and the router sends it elsewhere. The receiver prefills, unless the server sent the cache there
before it returned the request (``equipoise.rollout.transfer=kv``, and a server with ``hand_over_request``).
"""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from equipoise.trainer_hooks.on_verl.router.protocol import GENERATED_KEY, KV_BYTES_KEY

_ABORTED = ("aborted", "abort")
_LIMITS = ("max_tokens", "max_new_tokens")


class MovingClient(LLMServerClient):
    """Reports what a server returned, and asks again for the rest of a response that moves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server_request_ids: dict[str, str] = {}
        self._num_open = 0
        self._checks: asyncio.Task[None] | None = None
        self._nothing_moves = False

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        name = super()._vllm_request_id(request_id)
        found = await super()._acquire_server(request_id, server_request_id=name, **extra)
        self._server_request_ids[request_id] = name  # nothing else runs from here to the look-up below
        return found

    def _vllm_request_id(self, request_id: str) -> str:
        return self._server_request_ids.pop(request_id)

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate tokens from prompt ids, on one server after another if the request moves."""
        prompt: list[int] = normalize_token_ids(prompt_ids)
        params, so_far = sampling_params, None
        self._open()
        try:
            while True:
                tokens = prompt if so_far is None else prompt + so_far.token_ids
                output = await super().generate(request_id, prompt_ids=tokens, sampling_params=params, **kwargs)
                kv_bytes = output.extra_fields.pop(KV_BYTES_KEY, 0)
                so_far = output if so_far is None else joined(so_far, output)
                rest = None
                if output.stop_reason in _ABORTED:
                    rest = self._rest(sampling_params, len(prompt), len(so_far.token_ids))
                    if rest is None:
                        so_far.stop_reason = "completed"
                moves = await self._load_balancer.report.remote(
                    request_id, len(output.token_ids), aborted=rest is not None, kv_bytes=kv_bytes
                )
                if rest is None or not moves:
                    return so_far
                params = rest
        finally:
            self._num_open -= 1

    def _rest(self, sampling_params: dict[str, Any], prompt_tokens: int, generated: int) -> dict[str, Any] | None:
        """Sampling parameters for the rest of a response; None if it has reached its limit.

        If the caller sets no limit, that of verl's vLLM server applies (vllm_async_server.py:609). Otherwise the next
        server would take the tokens so far for a longer prompt, and allow a whole response on top.
        """
        key = next((name for name in _LIMITS if name in sampling_params), None)
        if key is None:
            rollout = self.config.actor_rollout_ref.rollout
            key, limit = _LIMITS[0], int(rollout.response_length)
            limit = min(limit, int(rollout.prompt_length) + limit - prompt_tokens)
        else:
            limit = int(sampling_params[key])
        left = max(limit, 1) - generated  # like vLLM, treat a limit below 1 as 1
        if left < 1:
            return None
        rest = {**sampling_params, key: left}
        if GENERATED_KEY in rest:
            rest[GENERATED_KEY] += generated
        return rest

    def _open(self) -> None:
        self._num_open += 1
        if not self._nothing_moves and (self._checks is None or self._checks.done()):
            self._checks = asyncio.create_task(self._check())

    async def _check(self) -> None:
        """Have the router look for moves while requests are open; it returns when to ask next."""
        while self._num_open:
            wait_s = await self._load_balancer.check.remote()
            if wait_s is None:
                self._nothing_moves = True
                return
            await asyncio.sleep(wait_s)


class MovingAsyncClient(FullyAsyncLLMServerClient, MovingClient):
    """The same below verl's client for partial rollouts, which continues requests that the trainer has aborted."""


def joined(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    """One response from two parts, generated one after the other."""
    fields = {**first.extra_fields, **second.extra_fields}
    for name in ("min_global_steps", "num_cached_tokens"):
        if name in first.extra_fields:
            fields[name] = first.extra_fields[name]
    experts = first.routed_experts
    if second.routed_experts is not None and second.token_ids:
        new = second.routed_experts[-len(second.token_ids) :]
        experts = second.routed_experts if experts is None else np.concatenate([experts, new])
    log_probs = first.log_probs
    if second.log_probs is not None:
        log_probs = [*(first.log_probs or []), *second.log_probs]
    return TokenOutput(
        token_ids=[*first.token_ids, *second.token_ids],
        log_probs=log_probs,
        routed_experts=experts,
        stop_reason=second.stop_reason,
        num_preempted=(first.num_preempted or 0) + (second.num_preempted or 0),
        extra_fields=fields,
    )
