"""A request within an engine, and the checks before an engine accepts it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from equipoise.errors import InvalidInput, must
from equipoise.rollout.transfer.state import RequestState


@dataclass(kw_only=True)
class Live:
    """A request within the engine; ``blocks`` is empty while it waits."""

    state: RequestState
    output: list[int]
    log_probs: list[float]
    blocks: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None

    @classmethod
    def of(cls, state: RequestState) -> Live:
        """The request as it arrived, without its cache."""
        return cls(state=replace(state, kv=None), output=list(state.output), log_probs=list(state.log_probs))

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.state.prompt) + len(self.output)

    def token(self, position: int) -> int:
        """Token id at a position of prompt and output."""
        prompt = self.state.prompt
        return prompt[position] if position < len(prompt) else self.output[position - len(prompt)]

    def snapshot(self, kv: Sequence[torch.Tensor] | None = None) -> RequestState:
        """The request as it is now. While it runs, all tokens except the last are in the cache."""
        return replace(
            self.state,
            output=tuple(self.output),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason,
            num_cached=self.num_tokens - 1 if self.blocks and self.finish_reason is None else 0,
            kv=kv,
        )


def check_request(state: RequestState, known: Collection[str], *, most_tokens: int, vocab_size: int) -> None:
    """Raise unless an engine can accept a request.

    Args:
        state: the request; if ``num_cached`` is above 0, its cache comes too.
        known: ids that the engine already holds.
        most_tokens: the most tokens of prompt and response that fit.
        vocab_size: the model's vocabulary size.

    Raises:
        InvalidInput: it is already here, is finished, can never fit, or has an invalid token.
    """
    name = f"request {state.id!r}"
    if state.id in known:
        raise InvalidInput(must(name, "be new", "one of that id", "give each request its own id"))
    if not {int, float}.issuperset(map(type, state.log_probs)) or not {int}.issuperset(map(type, state.tokens)):
        rule = "hold whole numbers as tokens and numbers as log_probs"
        raise InvalidInput(must(name, rule, state.tokens[:8], "convert them with tolist()"))
    if state.finish_reason is not None or len(state.output) >= state.sampling.max_tokens:
        raise InvalidInput(must(name, "be unfinished", state.finish_reason, "keep results where they are"))
    longest = len(state.prompt) + state.sampling.max_tokens
    if longest > most_tokens:
        remedy = "shorten it, or raise num_blocks if the model's positions allow it"
        raise InvalidInput(must(name, f"need at most {most_tokens} tokens with its max_tokens", longest, remedy))
    if max(state.tokens) >= vocab_size or min(state.tokens) < 0:
        rule = f"hold tokens below the vocabulary of {vocab_size}"
        raise InvalidInput(must(name, rule, max(state.tokens), "use the tokenizer of the model"))
    if state.num_cached and state.num_cached != state.num_tokens - 1:
        rule = f"have all {state.num_tokens} tokens except the last in its cache"
        raise InvalidInput(must(name, rule, state.num_cached, "leave the cache out, so that it is recomputed"))
