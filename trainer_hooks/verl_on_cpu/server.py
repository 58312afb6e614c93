"""The server actor of the rollout ``hf_cpu``: a decode engine of Equipoise on a CPU.

With equal weights, samples are bitwise repeatable. Each has its own random stream, seeded by ``rollout.seed``, the
prompt, and the name of the sample: training or validation, step, row of the data and sibling, which
:func:`~equipoise.trainer_hooks.verl_on_cpu.patches.attach` adds to the sampling parameters. A sample is the same on any
replica, in any order and batch, moved or not. A request without a name is named by how often its server was asked for
that prompt since the last weights, which repeats with one replica only. A whole run repeats if its mini-batches do;
those that the hook plans follow verl's random prompt ids.

A request can be handed over to another server with its cache. The receiver keeps the cache under the request's tokens
until it is needed; if it never is, or the weights change, the cache is dropped.

Environment:
    EQUIPOISE_CPU_SERVER_THREADS: torch threads of a server; 1 if unset.
    EQUIPOISE_CPU_LEN_SKEW: a number ``a`` > 0 gives each sample a limit of ``max(1, max_tokens * u**a)`` tokens, with
        ``u`` uniform and fixed by the sample's seed: a long tail of lengths for models that never emit a stop token.
        With 3, half of the samples are shorter than an eighth of the limit.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# verl ships no types for what is called here.

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from equipoise.config import RolloutConfig
from equipoise.errors import InvalidInput, must
from equipoise.rollout.decode import DecodeConfig, DecodeEngine
from equipoise.rollout.transfer import RequestState
from equipoise.trainer_hooks.on_verl.router.protocol import KV_BYTES_KEY
from equipoise.trainer_hooks.verl_on_cpu.request import Limits, read_request
from equipoise.trainer_hooks.verl_on_cpu.serving import DecodeLoop

logger = logging.getLogger("equipoise")

Weights = dict[str, NDArray[np.float32]]
_MOST_PARKED = 64
_SEND_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Parked:
    """A cache waiting for its request.

    Args:
        model: of the sender, see :class:`~equipoise.rollout.transfer.EngineFacts`.
        num_cached: tokens.
        layers: ``(layers, 2, num_kv_heads, blocks, block_size, head_dim)``.
    """

    model: str
    num_cached: int
    layers: NDArray[np.float32]


class HFCPUServer:
    """The rollout server that verl calls, for one whole model in one process."""

    def __init__(self, config: Any, model_config: Any) -> None:
        model_config = omega_conf_to_dataclass(model_config)
        stop_ids = _special_tokens(model_config)
        self._start(config, functools.partial(_load, model_config.local_path), set() if config.ignore_eos else stop_ids)

    def _start(self, config: Any, load: Callable[[], Any], stop_ids: Collection[int]) -> None:
        self.config = config
        self._stop_ids = stop_ids
        total = int(config.prompt_length) + int(config.response_length)

        def make_engine() -> DecodeEngine:
            torch.set_num_threads(int(os.environ.get("EQUIPOISE_CPU_SERVER_THREADS", "1")))
            tiers = decode_tiers(int(config.max_num_seqs))
            blocks = -(-total // DecodeConfig.block_size)
            return DecodeEngine(load(), DecodeConfig(tiers=tiers, num_blocks=tiers[0] * blocks))

        self.loop = DecodeLoop(make_engine)
        self.model: Any = self.loop.engine.model
        self._limits = Limits(response=int(config.response_length), total=min(total, self.loop.engine.max_tokens))
        self.global_steps: int | None = None
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._numbers = itertools.count()
        self._parked: LRUCache[tuple[int, ...], Parked] = LRUCache(_MOST_PARKED)  # for the engine's thread only
        self._missing: set[str] | None = None

    async def ready(self) -> None:
        """Return once the model is loaded."""

    async def sleep(self) -> None:
        """Finish running requests, then start nothing until :meth:`wake_up`."""
        if self.config.free_cache_engine:  # without it verl never wakes a server up
            await self.loop.close("sleep")

    async def wake_up(self) -> None:
        """Serve again."""
        self.loop.reopen("sleep")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Return what every request has generated; hold or reject later ones until :meth:`resume_generation`."""
        await self.loop.abort("abort", reject=reject_request)
        await self.loop.in_thread(self._parked.clear)

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Return what one request has generated so far, as verl's vLLM server does; there is no prefix cache."""
        return {"aborted": await self.loop.abort_one(request_id), "request_id": request_id}

    async def hand_over_request(self, request_id: str, receiver: Any) -> bool:
        """Send the cache of one request to another server, and return what it has generated so far.

        Args:
            request_id: as in :meth:`abort_request`.
            receiver: handle of the other server.

        Returns:
            Whether the request was here.
        """
        # it also sets the engine's thread count, so use the engine's own
        model = await self.loop.in_thread(lambda: self.loop.engine.facts().model)

        async def send(state: RequestState) -> int:
            assert state.kv is not None
            layers = np.stack([layer.numpy() for layer in state.kv])
            parked = Parked(model=model, num_cached=state.num_cached, layers=layers)
            sending = asyncio.wait_for(receiver.take_in.remote(list(state.tokens), parked), _SEND_S)
            (taken,) = await asyncio.gather(sending, return_exceptions=True)  # the request continues in any case
            if isinstance(taken, BaseException):
                logger.warning("equipoise: the cache of a request was not sent and will be recomputed: %r", taken)
                return 0
            return layers.nbytes if taken else 0

        return await self.loop.hand_over(request_id, send)

    async def take_in(self, tokens: list[int], parked: Parked) -> bool:
        """Keep the cache of a request that will follow; False if it is for another model or other weights."""

        def park() -> bool:
            useful = parked.model == self.loop.engine.facts().model
            if useful:
                self._parked[tuple(tokens)] = parked
            return useful

        return await self.loop.in_thread(park)

    def _with_cache(self, state: RequestState) -> RequestState:
        """The request with the cache that came for it, if any; in the engine's thread."""
        parked = self._parked.pop(state.tokens, None)
        fits = parked is not None and parked.num_cached == state.num_tokens - 1
        if parked is None or not fits or parked.model != self.loop.engine.facts().model:
            return state
        layers = [torch.from_numpy(layer) for layer in parked.layers.copy()]  # Ray's arrays are read-only
        return replace(state, num_cached=parked.num_cached, kv=layers)

    async def resume_generation(self) -> None:
        """Undo :meth:`abort_all_requests`."""
        self.loop.resume("abort")

    async def release_kv_cache(self) -> None:
        """Do nothing: a cache lives as long as its request."""

    async def resume_kv_cache(self) -> None:
        """Do nothing, see :meth:`release_kv_cache`."""

    async def clear_kv_cache(self) -> None:
        """Do nothing, see :meth:`release_kv_cache`."""

    async def start_profile(self, **_kwargs: object) -> None:
        """Do nothing: there is no device to profile."""

    async def stop_profile(self) -> None:
        """Do nothing: there is no device to profile."""

    async def update_weights(self, weights: Weights, *, last: bool, global_steps: int | None) -> None:
        """Load some of the weights; serve nothing from the first part until the last has come."""
        await self.loop.close("weights")
        await self.loop.in_thread(lambda: self._copy(weights))
        if self._missing is None:
            self._missing = {name for name, _ in self.model.named_parameters()}
        self._missing -= weights.keys()
        unknown = sorted(weights.keys() - self.model.state_dict().keys())
        if unknown or (last and self._missing):
            got = {"unknown": unknown, "missing": sorted(self._missing)}
            raise InvalidInput(must("weights", "match the model", got, "serve the model being trained"))
        if last:
            self._missing = None
            self.model.tie_weights()
            self.global_steps = global_steps
            self._asked.clear()
            self.loop.reopen("weights")

    def _copy(self, weights: Weights) -> None:
        self._parked.clear()
        own: dict[str, torch.Tensor] = self.model.state_dict()
        with torch.no_grad():
            for name in weights.keys() & own.keys():
                own[name].copy_(torch.tensor(weights[name]))

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **extra: object
    ) -> TokenOutput:
        """Sample one continuation. It does not depend on ``request_id``, which verl draws at random."""
        if media := sorted(name for name, value in extra.items() if value):
            raise InvalidInput(must("request", "be text only", media, "hf_cpu serves language models"))
        prompt = tuple(prompt_ids)
        state = read_request(
            prompt,
            sampling_params,
            name=f"{next(self._numbers)}",
            seed=self.config.seed,
            limits=self._limits,
            stream=f"{self.global_steps}/{self._asked[prompt]}",
            stop_ids=self._stop_ids,
        )
        self._asked[prompt] += 1
        answer = await self.loop.submit(state, request_id, with_cache=self._with_cache)
        begun = len(state.output)
        extra_fields: dict[str, Any] = {"global_steps": self.global_steps}
        if answer.kv_bytes:
            extra_fields[KV_BYTES_KEY] = answer.kv_bytes
        return TokenOutput(
            token_ids=list(answer.state.output[begun:]),
            log_probs=list(answer.state.log_probs[begun:]) if sampling_params.get("logprobs", True) else None,
            stop_reason="aborted" if answer.state.finish_reason is None else "completed",
            num_preempted=0,
            extra_fields=extra_fields,
        )


def decode_tiers(max_num_seqs: int) -> tuple[int, ...]:
    """Decode sizes: the default tiers of ``equipoise.rollout``, limited to the maximum number of requests at once.

    >>> decode_tiers(1024), decode_tiers(12), decode_tiers(2)
    ((64, 32, 16, 8, 4), (12, 8, 4), (2,))
    """
    tiers = RolloutConfig().tiers
    most = min(max_num_seqs, tiers[0])
    return most, *(size for size in tiers if size < most)


def _load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _special_tokens(model_config: Any) -> set[int]:
    """Stop tokens of the tokenizer and the generation settings."""
    more = getattr(model_config.generation_config, "eos_token_id", None)
    eos = [model_config.tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    return {token for token in eos if token is not None}
