"""Batched sampling from a causal language model, one random stream per request.

A request is sampled by inverting the cumulative distribution at a uniform number of its own generator: which tokens it
gets depends on its seed and its logits alone. What the batch around it changes is the rounding of the logits, about
1e-6; a token flips when its uniform number lies that close to a boundary.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# A transformers model and its cache are typed in part only.

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from equipoise.errors import InvalidInput, must

COMPACT_BELOW = 0.75


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = -1
    """Sample among the k likeliest; -1 or 0 for all."""
    top_p: float = 1.0
    """Sample among the likeliest that together have this probability."""
    generated: int = 0
    """Tokens at the end of the prompt that were sampled with this seed already; their random numbers are skipped."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidInput(must("prompt", "have a token", self.prompt, "pass at least one"))
        if not 0 <= self.generated < len(self.prompt):
            raise InvalidInput(must("generated", "leave a prompt", self.generated, "pass tokens at the prompt's end"))
        if self.max_new_tokens < 1:
            raise InvalidInput(must("max_new_tokens", "be at least 1", self.max_new_tokens, "raise the limit"))
        if self.temperature < 0:
            raise InvalidInput(must("temperature", "be at least 0", self.temperature, "pass 0 for greedy"))
        if self.top_k < -1:
            raise InvalidInput(must("top_k", "be at least -1", self.top_k, "pass -1 for all tokens"))
        if not 0 < self.top_p <= 1:
            raise InvalidInput(must("top_p", "be in (0, 1]", self.top_p, "pass 1 for all tokens"))


@dataclass(kw_only=True)
class Completion:
    """What a request has got so far."""

    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    """Natural logarithm of the probability each token was drawn with; greedy tokens, of the model's."""
    finished: bool = False
    """False when generation was stopped from outside."""


@torch.inference_mode()  # the mode belongs to a thread, so it is set where the work is and not where it is started
def generate(
    model: Any,
    requests: Sequence[Request],
    should_stop: Callable[[], bool] = lambda: False,
    *,
    stop_ids: Collection[int],
    pad_id: int,
    compact: bool = True,
    is_aborted: Callable[[int], bool] = lambda _: False,
    on_closed: Callable[[int, Completion], None] = lambda _row, _completion: None,
) -> list[Completion]:
    """Continue every request until a stop token or its limit.

    Args:
        model: causal language model of transformers, in evaluation mode.
        requests: prompts; they may differ in length and in sampling parameters.
        should_stop: asked before every token; True leaves the open requests unfinished.
        stop_ids: tokens that end a continuation; they are part of it.
        pad_id: fills the left of short prompts; masked, so any token does.
        compact: drop finished rows from the batch and the cache. Changes the cost, not the tokens.
        is_aborted: asked for each open request before every token; True leaves that one unfinished.
        on_closed: called with a request's number and completion as soon as it has finished or was aborted.

    Returns:
        One completion per request, in order.
    """
    done = [Completion() for _ in requests]
    if not requests:
        return done
    batch = _Batch(requests, pad_id)
    while batch.rows and not should_stop():
        for row in [row for row in batch.open if is_aborted(row)]:
            batch.open.discard(row)
            on_closed(row, done[row])
        if not batch.open:
            break
        logits = batch.step(model)
        tokens, log_probs = batch.sample(logits)
        for slot, row in enumerate(batch.rows):
            if row not in batch.open:
                continue
            done[row].token_ids.append(tokens[slot])
            done[row].log_probs.append(log_probs[slot])
            if tokens[slot] in stop_ids or len(done[row].token_ids) >= requests[row].max_new_tokens:
                done[row].finished = True
                batch.open.discard(row)
                on_closed(row, done[row])
        batch.append(tokens)
        if not batch.open:
            break
        if compact and len(batch.open) < COMPACT_BELOW * len(batch.rows):
            batch.compact()
    return done


class _Batch:
    """The open rows, left-padded to one length, with their cache and generators."""

    def __init__(self, requests: Sequence[Request], pad_id: int) -> None:
        self.requests = requests
        self.rows = list(range(len(requests)))
        self.open = set(self.rows)
        self.generators = [_stream(request) for request in requests]
        width = max(len(request.prompt) for request in requests)
        self.input_ids = torch.full((len(requests), width), pad_id)
        self.mask = torch.zeros((len(requests), width), dtype=torch.long)
        for row, request in enumerate(requests):
            self.input_ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            self.mask[row, width - len(request.prompt) :] = 1
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.cache = DynamicCache()

    def step(self, model: Any) -> torch.Tensor:
        """Logits of the next token, ``(rows, vocabulary)``."""
        output = model(
            input_ids=self.input_ids,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """One token a row and its log-probability."""
        requests = [self.requests[row] for row in self.rows]
        uniform = torch.tensor(
            [torch.rand((), generator=self.generators[row], dtype=torch.float64).item() for row in self.rows],
            dtype=torch.float64,
        )
        greedy = torch.tensor([request.temperature == 0 for request in requests])
        temperature = torch.tensor([request.temperature or 1.0 for request in requests])
        log_probs = torch.log_softmax(_truncate(logits / temperature[:, None], requests), dim=-1)
        tokens = torch.where(greedy, logits.argmax(-1), _invert(log_probs, uniform))
        return tokens.tolist(), log_probs.gather(-1, tokens[:, None]).squeeze(-1).tolist()

    def append(self, tokens: list[int]) -> None:
        """Make the sampled tokens the next input."""
        self.input_ids = torch.tensor(tokens)[:, None]
        self.positions = self.positions[:, -1:] + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=1)

    def compact(self) -> None:
        """Forget the finished rows, and the columns that only they filled."""
        slots = [slot for slot, row in enumerate(self.rows) if row in self.open]
        keep = torch.tensor(slots)
        self.rows = [self.rows[slot] for slot in slots]
        self.input_ids, self.positions, self.mask = self.input_ids[keep], self.positions[keep], self.mask[keep]
        first = int(self.mask.argmax(dim=1).min())
        self.mask = self.mask[:, first:]
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.keys = layer.keys[keep, :, first:]
            layer.values = layer.values[keep, :, first:]


def _stream(request: Request) -> torch.Generator:
    generator = torch.Generator().manual_seed(request.seed)
    for _ in range(request.generated):
        torch.rand((), generator=generator, dtype=torch.float64)
    return generator


def _truncate(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Logits with everything outside top-k, then top-p, at minus infinity."""
    for slot, request in enumerate(requests):
        row = logits[slot]
        if 0 < request.top_k < row.numel():
            row.masked_fill_(row < row.topk(request.top_k).values[-1], -torch.inf)
        if request.top_p < 1:
            ordered, order = row.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            row[order[before >= request.top_p]] = -torch.inf
    return logits


def _invert(log_probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative probability exceeds ``uniform`` of the whole."""
    cumulative = log_probs.double().exp().cumsum(-1)
    whole = cumulative[:, -1]
    target = torch.minimum(uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
