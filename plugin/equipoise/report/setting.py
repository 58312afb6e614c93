"""The simulated cluster and lengths. Anything that is not from the recipe's text is marked as assumed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from equipoise._arrays import IntArray
from equipoise.errors import InvalidInput, must
from equipoise.rollout.policy.step_time import StepTime
from equipoise.rollout.policy.worth import TransferCost

RECIPE = "https://gitcode.com/cann/cann-recipes-train: docs/features/rollout_rebalance.md and docs/llm_rl"

_MOST_TOKENS = 90_000
# Milliseconds of a step with an empty and a full cache. From the text: 125 to 200 at tier 64, about 60 at the low
# tiers. Assumed: the tiers in between. At 90,000 KV tokens a rank takes its 200 ms: then a rollout without moves takes
# as long as the text says, about 6200 s in one shape and 2861 s with tiers.
_MILLISECONDS = {4: (59.0, 63.0), 8: (66.0, 72.0), 16: (78.0, 92.0), 32: (95.0, 125.0), 64: (125.0, 200.0)}
_TIERS = tuple(_MILLISECONDS)


def recipe_step_time() -> StepTime:
    """Step times in the recipe's setting (DeepSeek-V3, 128 data-parallel ranks)."""
    return StepTime(
        tiers=_TIERS,
        base_s=tuple(_MILLISECONDS[tier][0] / 1e3 for tier in _TIERS),
        s_per_token=tuple((_MILLISECONDS[tier][1] - _MILLISECONDS[tier][0]) / 1e3 / _MOST_TOKENS for tier in _TIERS),
        most_tokens=_MOST_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class LengthLaw:
    """Response length = median × exp(between · z of the prompt + within · z of the response), clipped at ``longest``.

    The z are standard normal; a prompt has ``samples`` responses. Assumed: with these figures, tiers start to fall
    after one to two thousand steps, as the recipe's text says, and a few of 8192 responses reach the limit.
    """

    median: float = 1200.0
    between: float = 0.75
    within: float = 0.7
    longest: int = 32768
    samples: int = 16
    shortest_prompt: int = 64
    longest_prompt: int = 512

    def __post_init__(self) -> None:
        for name in ("median", "longest", "samples", "shortest_prompt"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise InvalidInput(must(name, "be at least 1", getattr(self, name), "see --help"))
        for name in ("between", "within"):
            if not 0 <= getattr(self, name) < 10:
                raise InvalidInput(must(name, "be from 0 to 10", getattr(self, name), "it is a standard deviation"))

    def draw(self, num_requests: int, seed: int) -> Responses:
        """Lengths of the responses to ``num_requests / samples`` prompts, siblings side by side."""
        rng = np.random.default_rng(seed)
        prompts = -(-num_requests // self.samples)
        z = self.between * rng.standard_normal((prompts, 1))
        z = z + self.within * rng.standard_normal((prompts, self.samples))
        length = np.clip(np.rint(self.median * np.exp(z)), 1, self.longest).astype(np.int64).ravel()
        tokens = rng.integers(self.shortest_prompt, self.longest_prompt + 1, prompts)
        prompt = np.repeat(np.arange(prompts, dtype=np.int64), self.samples)[:num_requests]
        return Responses(
            length=length[:num_requests], prompt=prompt, prompt_tokens=tokens[prompt], longest=self.longest
        )


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Length, prompt index and prompt tokens of each response, each of shape (n,); and the length limit."""

    length: IntArray
    prompt: IntArray
    prompt_tokens: IntArray
    longest: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Ranks, the time of their steps and the cost of moves.

    Attributes:
        num_ranks: data-parallel ranks that decode in lockstep.
        requests_per_rank: responses per rank.
        slots: requests that a rank decodes at once; the others wait. None: all.
        check_interval: decode steps between checks.
        step_time: seconds of a step; its tiers are the decode graphs.
        kv_bytes_per_token: assumed: 61 layers × 576 latent values × 2 bytes, DeepSeek-V3's compressed cache.
        bytes_per_s: bandwidth of a rank's link, each way; assumed.
        latency_s: fixed time of an exchange, including the gathering of states; the recipe measured below 2 ms.
        recompute: receivers prefill moved requests; no KV cache moves.
        prefill_tokens_per_s: prefill speed of a rank, for ``recompute``; assumed.
    """

    num_ranks: int = 128
    requests_per_rank: int = 64
    slots: int | None = None
    check_interval: int = 1000
    step_time: StepTime = field(default_factory=recipe_step_time)
    kv_bytes_per_token: int = 61 * 576 * 2
    bytes_per_s: float = 25e9
    latency_s: float = 0.002
    recompute: bool = False
    prefill_tokens_per_s: float = 5000.0

    def __post_init__(self) -> None:
        for name in ("num_ranks", "requests_per_rank", "check_interval", "kv_bytes_per_token"):
            if getattr(self, name) < 1:
                raise InvalidInput(must(name, "be at least 1", getattr(self, name), "see --help"))
        for name in ("bytes_per_s", "prefill_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidInput(must(name, "be above 0", getattr(self, name), "see --help"))
        if self.slots is not None and self.slots < 1:
            raise InvalidInput(must("slots", "be at least 1", self.slots, "leave it out to decode all at once"))
        if self.places > self.step_time.tiers[-1]:
            remedy = f"decode at most {self.step_time.tiers[-1]} at once (--slots)"
            raise InvalidInput(must("slots", "fit the largest tier", self.places, remedy))

    @property
    def places(self) -> int:
        """Requests that a rank decodes at once."""
        return self.slots or self.requests_per_rank

    @property
    def transfer(self) -> TransferCost:
        """The cost of an exchange."""
        if self.recompute:
            return TransferCost(latency_s=self.latency_s, prefill_s_per_token=1 / self.prefill_tokens_per_s)
        return TransferCost(latency_s=self.latency_s, kv_s_per_token=self.kv_bytes_per_token / self.bytes_per_s)
