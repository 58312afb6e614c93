"""The server actor of the rollout ``hf_cpu``: a model that samples with transformers on a CPU.

A run can be repeated. Each sample has a random stream of its own, seeded by ``rollout.seed``, the prompt, and the name
of the sample: training or validation, step, row of the data and sibling, which
:func:`~equipoise.trainer_hooks.verl_on_cpu.patches.attach` adds to the sampling parameters. Whichever replica answers,
in whichever order, a sample is the same. A request without a name counts how often its server was asked for that prompt
since the last weights, which repeats with one replica only. What is left to chance is rounding: the samples that share
a batch are those that happened to arrive together, and that moves logits by about 1e-6.

Environment:
    EQUIPOISE_CPU_SERVER_THREADS: torch threads of a server; 1 if unset.
    EQUIPOISE_CPU_LEN_SKEW: a number ``a`` > 0 gives each sample a limit of ``max(1, max_tokens * u**a)`` tokens, with
        ``u`` uniform and fixed by the sample's seed: a long tail of lengths for models that never emit a stop token.
        With 3, half of the samples are shorter than an eighth of the limit.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# verl ships no types for what is called here.

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from equipoise.errors import InvalidConfig, InvalidInput, must
from equipoise.trainer_hooks.verl_on_cpu.generate import Completion, Request, generate
from equipoise.trainer_hooks.verl_on_cpu.patches import GENERATED_KEY, STREAM_KEY
from equipoise.trainer_hooks.verl_on_cpu.serving import BatchQueue, Control

Weights = dict[str, NDArray[np.float32]]


def stream_seed(seed: int, prompt: Sequence[int], stream: str) -> int:
    """Seed of one sample.

    >>> stream_seed(42, [1, 2], "False/1/0/0") == stream_seed(42, [1, 2], "False/1/0/1")
    False
    """
    text = f"{seed}|{stream}|{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def skewed_limit(max_new_tokens: int, seed: int, skew: str | None) -> int:
    """Limit of one sample under ``EQUIPOISE_CPU_LEN_SKEW``.

    >>> skewed_limit(64, 1, None), skewed_limit(64, 1, "3") < 64
    (64, True)
    """
    if not skew:
        return max_new_tokens
    try:
        exponent = float(skew)
    except ValueError:
        exponent = 0.0
    if exponent <= 0:
        raise InvalidConfig(must("EQUIPOISE_CPU_LEN_SKEW", "be a number above 0", skew, "unset it for plain lengths"))
    return max(1, int(max_new_tokens * random.Random(seed).random() ** exponent))


def read_request(
    prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], *, seed: int, max_new_tokens: int, stream: str
) -> Request:
    """Request behind verl's sampling parameters; one that would be ignored is an error.

    Args:
        prompt_ids: tokens of the prompt; under ``GENERATED_KEY`` the parameters say how many at its end were sampled
            elsewhere, and the sample goes on as it would have gone on there.
        sampling_params: as verl's agent loops pass them.
        seed: of the server.
        max_new_tokens: limit where the parameters have none, and never exceeded.
        stream: name of the sample where the parameters have none.
    """
    params = dict(sampling_params)
    prompt = tuple(int(token) for token in prompt_ids)
    generated = int(params.pop(GENERATED_KEY, 0))
    seed = stream_seed(seed, prompt[: len(prompt) - generated], params.pop(STREAM_KEY, stream))
    limits = [params.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
    limit = min([max_new_tokens, *(int(given) + generated for given in limits if given is not None)])
    params.pop("logprobs", None)
    penalty = params.pop("repetition_penalty", 1.0)
    if penalty != 1.0:
        raise InvalidInput(must("repetition_penalty", "be 1", penalty, "hf_cpu has none"))
    known = {name: params.pop(name) for name in ("temperature", "top_k", "top_p") if name in params}
    if params:
        raise InvalidInput(must("sampling_params", "be known", sorted(params), "hf_cpu would ignore these"))
    limit = skewed_limit(limit, seed, os.environ.get("EQUIPOISE_CPU_LEN_SKEW")) - generated
    return Request(prompt=prompt, max_new_tokens=limit, seed=seed, generated=generated, **known)


class HFCPUServer:
    """What verl calls on a rollout server, for one whole model in one process."""

    def __init__(self, config: Any, model_config: Any) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(int(os.environ.get("EQUIPOISE_CPU_SERVER_THREADS", "1")))
        self.config = config
        model_config = omega_conf_to_dataclass(model_config)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model_config.local_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        stop_ids, pad_id = _special_tokens(model_config)
        self._sample = functools.partial(
            generate, self.model, stop_ids=set() if config.ignore_eos else stop_ids, pad_id=pad_id
        )
        self.queue = BatchQueue(self._answer, max_batch=config.max_num_seqs)
        self.global_steps: int | None = None
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._missing: set[str] | None = None

    def _answer(self, requests: Sequence[Request], control: Control) -> list[Completion]:
        return self._sample(requests, control, is_aborted=control.is_aborted, on_closed=control.close)

    async def ready(self) -> None:
        """Return once the model is loaded."""

    async def sleep(self) -> None:
        """Finish the running batch, then start none until :meth:`wake_up`."""
        if self.config.free_cache_engine:  # without it verl never wakes a server up
            await self.queue.close("sleep")

    async def wake_up(self) -> None:
        """Serve again."""
        self.queue.reopen("sleep")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Hand back what every request has got so far; hold or reject later ones until :meth:`resume_generation`."""
        await self.queue.abort("abort", reject=reject_request)

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Hand back what one request has got so far, as verl's vLLM server does; there is no prefix cache."""
        return {"aborted": self.queue.abort_one(request_id), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Undo :meth:`abort_all_requests`."""
        self.queue.resume("abort")

    async def release_kv_cache(self) -> None:
        """Do nothing: a cache lives as long as its batch."""

    async def resume_kv_cache(self) -> None:
        """Do nothing, see :meth:`release_kv_cache`."""

    async def clear_kv_cache(self) -> None:
        """Do nothing, see :meth:`release_kv_cache`."""

    async def start_profile(self, **_kwargs: object) -> None:
        """Do nothing: there is no device to profile."""

    async def stop_profile(self) -> None:
        """Do nothing: there is no device to profile."""

    async def update_weights(self, weights: Weights, *, last: bool, global_steps: int | None) -> None:
        """Take a part of the weights; serve nothing from the first part until the last is in."""
        await self.queue.close("weights")
        own: dict[str, torch.Tensor] = self.model.state_dict()
        unknown = sorted(weights.keys() - own.keys())
        with torch.no_grad():
            for name in weights.keys() & own.keys():
                own[name].copy_(torch.tensor(weights[name]))
        if self._missing is None:
            self._missing = {name for name, _ in self.model.named_parameters()}
        self._missing -= weights.keys()
        if unknown or (last and self._missing):
            got = {"unknown": unknown, "missing": sorted(self._missing)}
            raise InvalidInput(must("weights", "be those of the model", got, "serve the model that is trained"))
        if last:
            self._missing = None
            self.model.tie_weights()
            self.global_steps = global_steps
            self._asked.clear()
            self.queue.reopen("weights")

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **extra: object
    ) -> TokenOutput:
        """Sample one continuation. ``request_id`` has no say in what is sampled: verl draws it at random."""
        if media := sorted(name for name, value in extra.items() if value):
            raise InvalidInput(must("request", "be text only", media, "hf_cpu serves language models"))
        prompt = tuple(prompt_ids)
        request = read_request(
            prompt,
            sampling_params,
            seed=self.config.seed,
            max_new_tokens=self.config.response_length,
            stream=f"{self.global_steps}/{self._asked[prompt]}",
        )
        self._asked[prompt] += 1
        completion: Completion = await self.queue.submit(request, request_id)
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs if sampling_params.get("logprobs", True) else None,
            stop_reason="completed" if completion.finished else "aborted",
            num_preempted=0,
            extra_fields={"global_steps": self.global_steps},
        )


def _special_tokens(model_config: Any) -> tuple[set[int], int]:
    """Stop tokens of the tokenizer and of the generation settings, and a token to pad with."""
    more = getattr(model_config.generation_config, "eos_token_id", None)
    eos = [model_config.tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    stop_ids = {token for token in eos if token is not None}
    pad_ids = [model_config.tokenizer.pad_token_id, *sorted(stop_ids), 0]
    return stop_ids, next(token for token in pad_ids if token is not None)
