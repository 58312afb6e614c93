"""Small random models, engines and requests for the tests of decoding."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

from equipoise.rollout.decode import DecodeConfig, DecodeEngine
from equipoise.rollout.transfer import RequestState, Sampling

VOCAB = 61


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
}


KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def model(kind: str = "qwen2", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config, cls = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return cls(config(**(SHAPE | changes))).to(dtype).eval()


def engine(made: Any | None = None, **settings: Any) -> DecodeEngine:
    settings = {"tiers": (16, 8, 4), "num_blocks": 128, "block_size": 8, "chunk_tokens": 32} | settings
    return DecodeEngine(model() if made is None else made, DecodeConfig(**settings))


def asks(number: int = 14, *, greedy: bool = False) -> list[RequestState]:
    draws = random.Random(3)
    made: list[RequestState] = []
    for index in range(number):
        sampling = Sampling(
            seed=index,
            temperature=0.0 if greedy or index % 3 == 0 else 1.0,
            top_k=(0, 12)[index % 2],
            top_p=(1.0, 0.9)[index % 5 == 0],
            repetition_penalty=(1.0, 1.3)[not greedy and index % 4 == 0],
            max_tokens=5 + 7 * (index % 6),
        )
        prompt = tuple(draws.randrange(VOCAB) for _ in range(1 + 11 * (index % 7)))
        made.append(RequestState(id=str(index), prompt=prompt, sampling=sampling))
    return made
