"""Rollout, with HF's ``generate`` or with the decode engine: a row samples by its own number, whatever is beside it."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers is typed in part only.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import equipoise as eq
from examples.minimal.task import END, PROMPT_TOKENS


class RowNoise(LogitsProcessor):
    """Gumbel noise of a generator for each row: the largest of ``logits + noise`` is a draw from their softmax.

    Args:
        seeds: one for each row.

    Source: Gumbel-max; C. Maddison et al., A* Sampling, 2014 (arXiv 1411.0030), section 2.
    """

    def __init__(self, seeds: Iterable[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores with noise, shape (rows, vocabulary)."""
        size = scores.shape[-1]
        uniform = torch.stack([torch.rand(size, generator=g, dtype=torch.float64) for g in self._generators])
        return scores - uniform.log().neg().log().to(scores)


class GenerateSampler:
    """A whole copy of the policy on each rank, and HF's ``generate``.

    Args:
        model: HF causal language model.
        max_new_tokens: longest response.
    """

    def __init__(self, model: Any, *, max_new_tokens: int) -> None:
        self.model = model.eval()
        self.max_new_tokens = max_new_tokens

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over an engine's weights, as ``get_per_tensor_param`` gives them."""
        self.model.load_state_dict(dict(weights))

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """One response to each prompt, with the token that ends it.

        Args:
            prompts: tokens.
            seeds: one for each; the same prompt and seed give the same response in any company.
        """
        if not prompts:
            return []
        width = max(map(len, prompts))
        device = self.model.device
        ids = torch.tensor([[END] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            logits_processor=LogitsProcessorList([RowNoise(seeds)]),
        )
        return [_ended(row) for row in out[:, width:].tolist()]


class DecodeSampler:
    """A decode engine on each rank; unfinished requests move from crowded ranks to idle ones, with their KV cache.

    Args:
        model: HF causal language model.
        max_new_tokens: longest response.
    """

    def __init__(self, model: Any, *, max_new_tokens: int) -> None:
        self.model = model
        self.max_new_tokens = max_new_tokens
        tiers = (64, 32, 16, 8, 4)
        blocks = -(-(PROMPT_TOKENS + max_new_tokens) // eq.DecodeConfig.block_size)
        engine = eq.DecodeEngine(model, eq.DecodeConfig(tiers=tiers, num_blocks=tiers[0] * blocks))
        self._rebalancer = eq.RolloutRebalancer(engine, config=eq.RebalancerConfig(tiers=tiers, check_interval=4))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As :meth:`GenerateSampler.load`."""
        self.model.load_state_dict(dict(weights))

    def sample(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """As :meth:`GenerateSampler.sample`, but a collective call."""
        requests = [
            eq.RequestState(
                id=str(seed),
                prompt=tuple(prompt),
                sampling=eq.Sampling(seed=seed, max_tokens=self.max_new_tokens, stop_token_ids=(END,)),
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [list(done.output) for done in self._rebalancer.generate(requests)]


SAMPLERS = {"generate": GenerateSampler, "decode": DecodeSampler}
"""By the name of the setting ``rollout``."""


def _ended(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens
