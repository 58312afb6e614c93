"""FLOPs from a configuration against torch's own count of the real model."""

# transformers is typed in part.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import equipoise as eq
from equipoise.planning.workload.model_flops import model_flops

SMALL: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 1000}
SHAPES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=700),
    "llama-tied": transformers.LlamaConfig(
        **SMALL, num_key_value_heads=8, intermediate_size=700, tie_word_embeddings=True
    ),
    "qwen2": transformers.Qwen2Config(**SMALL, num_key_value_heads=4, intermediate_size=640),
    "qwen3": transformers.Qwen3Config(**SMALL, num_key_value_heads=4, intermediate_size=640, head_dim=64),
    "gemma": transformers.GemmaConfig(**SMALL, num_key_value_heads=1, intermediate_size=900, head_dim=48),
    "phi": transformers.PhiConfig(**SMALL, intermediate_size=900),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    ),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **SMALL,
        num_key_value_heads=4,
        intermediate_size=512,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=128,
        num_experts=6,
        num_experts_per_tok=2,
    ),
    "mixtral": transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=200, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **SMALL,
        num_key_value_heads=8,
        intermediate_size=512,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
    ),
}
SPARSE = {"qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v3"}


def counted(config: Any, length: int, device: str) -> float:
    """Exact FLOPs of one forward pass: matrix products of the real model as torch's dispatcher sees them."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        ids = torch.zeros(1, length, dtype=torch.long) if device == "meta" else torch.arange(length)[None] % 997
        mask = torch.zeros(1, 1, length, length)  # given whole: making one would read values, which meta has none of
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("name", list(SHAPES))
def test_flops_are_within_two_per_cent_of_the_exact_count(name: str) -> None:
    """Sparse models route by values, which the meta device does not have: they are counted on the CPU."""
    config = SHAPES[name]
    device = "cpu" if name in SPARSE else "meta"
    cost = eq.TransformerCost.from_model_config(config)
    for length in (32, 512) if name in SPARSE else (64, 2048):
        assert float(cost([length])[0]) == pytest.approx(counted(config, length, device), rel=0.02), length


def test_the_linear_coefficient_follows_the_hidden_size() -> None:
    cost = eq.TransformerCost.from_hidden_size(1024)
    assert (cost.linear, cost.quadratic) == (6144.0, 1.0)
    assert eq.TransformerCost.from_hidden_size(4096) == eq.TransformerCost()


def test_a_real_configuration_of_32_billion_active_parameters() -> None:
    """DeepSeek-V3 as published: 37 B active parameters, of which 0.9 B are the embedding that is only looked up."""
    flops = model_flops(transformers.DeepseekV3Config())
    assert flops.per_token / 2 == pytest.approx(36.6e9, rel=0.02)


def test_pairs_outside_a_sliding_window_cost_nothing() -> None:
    base = transformers.MistralConfig(**SMALL, num_key_value_heads=2, intermediate_size=700, sliding_window=None)
    slide = transformers.MistralConfig(**SMALL, num_key_value_heads=2, intermediate_size=700, sliding_window=100)
    whole, windowed = (eq.TransformerCost.from_model_config(config) for config in (base, slide))
    assert whole([100]) == windowed([100])
    pair = model_flops(base).per_pair
    # 1000² pairs less the 900² that are further apart than the window
    assert float(whole([1000])[0] - windowed([1000])[0]) == pytest.approx(pair * 900**2)


def test_half_of_the_layers_may_slide() -> None:
    config = transformers.Gemma2Config(
        **{**SMALL, "num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=500,
        sliding_window=64,
    )
    flops = model_flops(config)
    assert flops.windows == ((64, flops.per_pair),)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba2"}, ["model_type", "'mamba2'", "TransformerCost(linear, quadratic)"]),
        ({"model_type": "lama"}, ["model_type", "did you mean 'llama'"]),
        ({"model_type": "llama", "hidden_size": 64}, ["llama config.num_hidden_layers", "None"]),
        (
            {"model_type": "qwen3", **SMALL, "intermediate_size": None},
            ["qwen3 config.intermediate_size must be a whole number of at least 1, got None"],
        ),
        (
            {"model_type": "llama", **SMALL, "intermediate_size": 9, "sliding_window": 5},
            ["llama config.layer_types", "sliding_window"],
        ),
    ],
)
def test_an_unknown_shape_is_an_error_that_names_what_is_missing(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(eq.InvalidInput) as caught:
        model_flops(config)
    for word in words:
        assert word in str(caught.value)
