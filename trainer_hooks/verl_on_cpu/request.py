"""Translate verl's call of an ``hf_cpu`` server into a request of the decode engine."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.errors import InvalidConfig, InvalidInput, must
from equipoise.rollout.transfer import RequestState, Sampling
from equipoise.trainer_hooks.on_verl.router.protocol import GENERATED_KEY
from equipoise.trainer_hooks.verl_on_cpu.patches import STREAM_KEY

_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def stream_seed(seed: int, prompt: Sequence[int], stream: str) -> int:
    """Return the seed of one sample.

    >>> stream_seed(42, [1, 2], "False/1/0/0") == stream_seed(42, [1, 2], "False/1/0/1")
    False
    """
    text = f"{seed}|{stream}|{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def skewed_limit(max_new_tokens: int, seed: int, skew: str | None) -> int:
    """Return the limit of one sample under ``EQUIPOISE_CPU_LEN_SKEW``.

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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request's length.

    Args:
        response: maximum tokens of a response.
        total: maximum tokens of prompt and response together.
    """

    response: int
    total: int


def read_request(
    prompt_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    *,
    name: str,
    seed: int,
    limits: Limits,
    stream: str,
    stop_ids: Collection[int] = (),
) -> RequestState:
    """Read verl's sampling parameters as a request; unknown parameters are an error.

    Args:
        prompt_ids: tokens of the prompt. The parameter ``GENERATED_KEY`` says how many at its end were sampled
            elsewhere; the sample continues as it would have there.
        sampling_params: as verl's agent loops pass them.
        name: id of the request.
        seed: the server's seed.
        limits: upper limits, and the defaults if the parameters set none.
        stream: name of the sample if the parameters have none.
        stop_ids: tokens that end a response.
    """
    params = dict(sampling_params)
    tokens = tuple(int(token) for token in prompt_ids)
    generated = int(params.pop(GENERATED_KEY, 0))
    if not 0 <= generated < max(len(tokens), 1):
        raise InvalidInput(must(GENERATED_KEY, "leave a prompt", generated, "pass tokens at the prompt's end"))
    prompt, output = tokens[: len(tokens) - generated], tokens[len(tokens) - generated :]
    seed = stream_seed(seed, prompt, params.pop(STREAM_KEY, stream))
    given = [params.pop(key, None) for key in ("max_tokens", "max_new_tokens")]
    limit = min([limits.response, *(int(each) + generated for each in given if each is not None)])
    params.pop("logprobs", None)
    if params.get("top_k") == -1:
        params["top_k"] = 0
    known = {key: params.pop(key) for key in _SAMPLING if key in params}
    if params:
        raise InvalidInput(must("sampling_params", "be known", sorted(params), "hf_cpu would ignore these"))
    limit = skewed_limit(limit, seed, os.environ.get("EQUIPOISE_CPU_LEN_SKEW"))
    if len(prompt) >= limits.total:
        rule = f"be below {limits.total}, the limit on prompt and response together"
        remedy = "raise rollout.prompt_length, or shorten the prompt"
        raise InvalidInput(must("tokens of the prompt", rule, len(prompt), remedy))
    limit = min(limit, limits.total - len(prompt))
    sampling = Sampling(seed=seed, max_tokens=limit, stop_token_ids=tuple(sorted(stop_ids)), **known)
    return RequestState(id=name, prompt=prompt, sampling=sampling, output=output, log_probs=(0.0,) * generated)
