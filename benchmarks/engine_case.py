"""What the engines are measured on: one model, its rows, and how they are dealt to ranks."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import equipoise as eq

PROMPT = 16
NOISE = 0.1
"""Standard deviation of what separates old log-probs from those of the engine's first pass: some ratios are clipped."""


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """The same for all engines.

    Args:
        model: folder of a HF causal language model.
        vocabulary: token ids are drawn below it.
        lengths: tokens of each row, prompt of 16 and response.
        max_token_len: cap of a micro-batch, in tokens; each engine cuts for itself under it.
        checkpointing: recompute activations in the backward.
        attention: attention function of verl's model, by its name in transformers.
        lr: of AdamW.
    """

    model: Path
    vocabulary: int
    lengths: tuple[int, ...]
    max_token_len: int
    checkpointing: bool = True
    attention: str = "equipoise_varlen_cpu"
    lr: float = 1e-6

    @property
    def num_tokens(self) -> int:
        """Tokens of one update, over all ranks."""
        return sum(self.lengths)

    def share(self, rank: int, world: int) -> list[int]:
        """Numbers of the rows of one rank: as many on each, with even loads."""
        spec = eq.StepSpec(dp_size=world, max_token_len_per_gpu=self.max_token_len)
        return eq.plan_step(list(self.lengths), spec).rank_rows(rank).tolist()

    def row(self, number: int) -> dict[str, torch.Tensor]:
        """Token ids, advantages and noise of one row, shape (tokens,); the same on every rank and engine."""
        draw = torch.Generator().manual_seed(number)
        n = self.lengths[number]
        return {
            "input_ids": torch.randint(3, self.vocabulary, (n,), generator=draw),
            "loss_mask": (torch.arange(n) >= PROMPT).long(),
            "advantages": torch.randn(n, generator=draw),
            "noise": NOISE * torch.randn(n, generator=draw),
        }


def log_normal_lengths(num_rows: int, num_tokens: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens of rows drawn from a log-normal of sigma 0.8, about ``num_tokens`` together, none above ``longest``.

    >>> sum(log_normal_lengths(8, 800, 400)) <= 800 + 8 * PROMPT
    True
    """
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.8, num_rows)
    return tuple(int(n) for n in np.clip(drawn / drawn.sum() * num_tokens, PROMPT + 1, longest))


def write_tiny_llama(folder: Path) -> int:
    """Save a Llama of about 0.3 million parameters and return its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return int(config.vocab_size)
