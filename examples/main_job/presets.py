"""What the job trains, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

NUM_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model with batch sizes that fit two CPU cores."""

    name: str
    title: str
    """How the model is called in titles."""
    task: str
    """What is asked and what earns a reward, for people to read."""
    steps: int
    train_batch_size: int
    """Prompts a step."""
    num_samples: int
    """Responses a prompt, GRPO's group."""
    mini_batch_size: int
    """Prompts an optimizer step."""
    max_prompt_length: int
    max_response_length: int
    max_token_len: int
    """Tokens that a micro-batch of one rank may hold."""
    learning_rate: float
    startup_s: float
    """Until the first step begins, on two quiet cores; the first guess of the time left."""
    step_s: float
    """Likewise for a step."""
    memory_gb: float
    """Peak of all processes together."""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset(
                name="smollm2",
                title="SmolLM2-135M-Instruct",
                task="sums of two one-digit numbers (reasoning-gym), 1 for the right answer",
                steps=5,
                train_batch_size=6,
                num_samples=4,
                mini_batch_size=3,
                max_prompt_length=48,
                max_response_length=96,
                max_token_len=224,
                learning_rate=1e-5,
                startup_s=50,
                step_s=60,
                memory_gb=13,
            ),
            Preset(
                name="tiny",
                title="a Qwen2 of 127,000 random parameters",
                task="a toy: share of digits in the answer",
                steps=6,
                train_batch_size=8,
                num_samples=4,
                mini_batch_size=4,
                max_prompt_length=128,
                max_response_length=256,
                max_token_len=640,
                learning_rate=1e-3,
                startup_s=55,
                step_s=4,
                memory_gb=6,
            ),
        )
    }
)
