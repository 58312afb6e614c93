"""Small random models for the tests of verl on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from equipoise.trainer_hooks.verl_on_cpu.attention import register
from equipoise.trainer_hooks.verl_on_cpu.request import Limits

VOCABULARY = 97
LIMITS = Limits(response=40, total=64)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}
HEAD: dict[str, Any] = {"num_labels": 1, "classifier_dropout": 0.0}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2 critic": lambda: Qwen2ForTokenClassification(Qwen2Config(**SHAPE, **HEAD)),
}


def model_of(family: str, attention: str) -> Any:
    torch.manual_seed(1)
    model = FAMILIES[family]()
    model.set_attn_implementation(attention)
    for parameter in model.parameters():  # larger than at initialization, so that attention is far from uniform
        parameter.data.mul_(3)
    return model


def one_stream() -> None:
    """The same random numbers and one thread in every test."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    register()
