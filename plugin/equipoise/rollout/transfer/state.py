"""The state of a request when it moves, the facts of an engine, and the protocol that engines implement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from equipoise._checks import numbers, of_kind
from equipoise.errors import InvalidInput, must

FINISH_REASONS = ("stop", "length")
"""Why a request ended: a stop token, or ``max_tokens``."""


_WHOLE = ("seed", "top_k", "max_tokens")
_REAL = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request's tokens are sampled, and when it stops.

    Args:
        seed: seed of its random numbers; token ``i`` uses number ``i`` of that seed, whatever was sampled before.
        temperature: divides the logits; 0 for greedy sampling.
        top_k: sample from the ``top_k`` most likely tokens; 0 for all.
        top_p: sample from the most likely tokens with this total probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens so far, including the prompt's.
        presence_penalty: subtracted from the logits of output tokens so far.
        frequency_penalty: the same, times their number of occurrences.
        stop_token_ids: tokens that end the response; they are part of it.
        max_tokens: the most tokens of a response.

    Raises:
        InvalidInput: a value is out of range.
    """

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16

    def __post_init__(self) -> None:
        numbers(self, whole=_WHOLE, real=_REAL, remedy="fix the request's sampling")
        stops = cast(object, self.stop_token_ids)
        if not isinstance(stops, tuple) or not all(isinstance(x, int) for x in cast("tuple[object, ...]", stops)):
            rule = "be a tuple of token ids"
            raise InvalidInput(must("stop_token_ids", rule, self.stop_token_ids, "pass for example (2,)"))
        rules = (
            ("seed", 0 <= self.seed < 2**63, "be from 0 to 2**63 - 1"),
            ("temperature", 0 <= self.temperature < math.inf, "be at least 0 and finite"),
            ("top_k", 0 <= self.top_k < 2**31, "be at least 0"),
            ("top_p", 0 < self.top_p <= 1, "be above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "be above 0 and finite"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "be finite"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "be finite"),
            ("stop_token_ids", all(0 <= token < 2**31 for token in self.stop_token_ids), "be token ids"),
            ("max_tokens", 1 <= self.max_tokens < 2**31, "be at least 1"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise InvalidInput(must(name, rule, getattr(self, name), "fix the request's sampling"))


@dataclass(frozen=True, kw_only=True)
class RequestState:
    """A request from submission to result, with all that another rank needs to continue it.

    There is no generator state: ``sampling.seed`` and the number of output tokens determine what comes next, and
    penalties follow from the tokens.

    Args:
        id: unique over all ranks.
        prompt: token ids; at least one. A list becomes a tuple, here and below.
        sampling: how to continue.
        home: rank that submitted it.
        index: position of its result among those of ``home``.
        output: tokens so far.
        log_probs: log-probs of these tokens, in nats.
        finish_reason: one of :data:`FINISH_REASONS`, or None while it runs.
        num_cached: number of leading tokens whose keys and values are in the cache.
        kv: cache blocks of these tokens per layer, ``(2, num_kv_heads, blocks, block_size, head_dim)``; None if the
            cache must be recomputed.

    Raises:
        InvalidInput: the prompt is empty, or the parts are inconsistent.

    >>> state = RequestState(id="a", prompt=(5, 6), sampling=Sampling())
    >>> state.tokens, state.num_tokens
    ((5, 6), 2)
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    home: int = 0
    index: int = 0
    output: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finish_reason: str | None = None
    num_cached: int = 0
    kv: Sequence[torch.Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        of_kind("id of a request", self.id, str, "name it by a string")
        where = f"of request {self.id!r}"
        of_kind(f"sampling {where}", self.sampling, Sampling, "pass equipoise.Sampling(...)")
        for name in ("prompt", "output", "log_probs"):
            of_kind(f"{name} {where}", getattr(self, name), (tuple, list), "pass a tuple, one value per token")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.prompt:
            raise InvalidInput(must(f"prompt {where}", "hold at least one token", [], "leave the request out"))
        if len(self.log_probs) != len(self.output):
            rule = f"be one per output token, {len(self.output)}"
            raise InvalidInput(must(f"log_probs {where}", rule, len(self.log_probs), "pass one per token"))
        if self.finish_reason not in (None, *FINISH_REASONS):
            rule = f"be None or one of {list(FINISH_REASONS)}"
            raise InvalidInput(must(f"finish_reason {where}", rule, self.finish_reason, "pass how it ended"))
        if not 0 <= self.num_cached <= self.num_tokens:
            rule = f"be from 0 to its {self.num_tokens} tokens"
            raise InvalidInput(must(f"num_cached {where}", rule, self.num_cached, "pass the tokens in the cache"))
        if len(self.output) > self.sampling.max_tokens:
            rule = f"hold at most max_tokens = {self.sampling.max_tokens}"
            raise InvalidInput(must(f"output {where}", rule, len(self.output), "raise max_tokens"))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape of a paged cache; one block of one layer is ``(2, num_kv_heads, block_size, head_dim)``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def blocks(self, num_tokens: int) -> int:
        """Blocks needed for ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def nbytes(self, num_tokens: int) -> int:
        """Bytes for ``num_tokens`` over all layers, in whole blocks."""
        itemsize = self.torch_dtype.itemsize
        return (
            self.blocks(num_tokens)
            * self.num_layers
            * 2
            * self.num_kv_heads
            * self.block_size
            * self.head_dim
            * itemsize
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the blocks."""
        return DTYPES[self.dtype]


DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What ranks compare before anything moves.

    Args:
        layout: layout of the cache; must agree.
        model: identifies the model and its arithmetic; must agree.
        tiers: decode sizes, descending; must agree.
        slots: the most requests that run at once.
        free_blocks: cache blocks that no request holds.
        num_blocks: all cache blocks.
    """

    layout: KVLayout
    model: str
    tiers: tuple[int, ...]
    slots: int
    free_blocks: int
    num_blocks: int


class MovableEngine(Protocol):
    """An engine whose requests can move. Methods do all or nothing.

    A request leaves through ``export``, which only reads, and, once it has arrived elsewhere, ``abort``. It arrives
    through ``reserve``, one ``write`` per layer of its cache, if any, and ``commit``; ``abort`` undoes ``reserve``.
    """

    def facts(self) -> EngineFacts:
        """Identity and free room of the engine."""
        ...

    def list_requests(self) -> Sequence[RequestState]:
        """Unfinished requests without their cache, running ones first; ``num_cached`` is 0 for the others."""
        ...

    def export(self, ids: Sequence[str]) -> list[RequestState]:
        """Unfinished requests with their cache, if any, without removing them. A layer may be copied when read."""
        ...

    def abort(self, ids: Sequence[str]) -> None:
        """Forget unfinished and reserved requests, and free their resources."""
        ...

    def reserve(self, states: Sequence[RequestState]) -> None:
        """Reserve room for requests; a cache follows if ``num_cached`` is above 0."""
        ...

    def write(self, layer: int, ids: Sequence[str], content: torch.Tensor) -> None:
        """Write one layer of reserved requests' caches: concatenated blocks, in the order of ``ids``."""
        ...

    def commit(self, ids: Sequence[str]) -> None:
        """Continue reserved requests at the next step."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The record of a decode step.

    Args:
        tier: its tier.
        num_running: rows with a request.
        context_tokens: total context of these requests.
        seconds: from rows to tokens, without the prefills of newly admitted requests.
        prefilled_tokens: tokens of those prefills.
        prefill_seconds: duration of those prefills.
    """

    tier: int
    num_running: int
    context_tokens: int
    seconds: float
    prefilled_tokens: int = 0
    prefill_seconds: float = 0.0


class SteppingEngine(MovableEngine, Protocol):
    """A movable engine that is driven one decode step at a time."""

    def step(self) -> StepReport | None:
        """Generate one token for each running request; None if there is none."""
        ...

    def take_finished(self) -> list[RequestState]:
        """Requests that finished since the last call, without their cache."""
        ...

    def clear(self) -> None:
        """Forget every request: unfinished, reserved, and finished."""
        ...
