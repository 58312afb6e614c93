"""FLOPs of a forward pass, computed from a model's configuration.

A multiply-add counts as two. The linear term covers projections, active experts and the vocabulary head; the quadratic
term covers attention scores and their product with the values, over the full square as FLOP counters do (a causal
kernel computes half of it, for every row alike). Embedding look-ups, norms and activations are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from equipoise.errors import InvalidInput, must, nearest

GATED = frozenset(
    {"llama", "granite", "ministral", "mistral", "mixtral", "phi3", "smollm3"}
    | {"cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4"}
    | {"deepseek_v2", "deepseek_v3", "olmo", "olmo2", "olmo3"}
    | {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
)
"""Model types whose feed-forward blocks have three matrices (gate, up, down)."""

PLAIN = frozenset(["gpt_neox", "opt", "phi", "starcoder2"])
"""Model types whose feed-forward blocks have two matrices."""


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of one forward pass over a row of L tokens: per_token · L + per_pair · L² + Σ c · pairs(L, w).

    Attributes:
        per_token: FLOPs of projections, feed-forward blocks and head.
        per_pair: FLOPs of attention layers without a window.
        windows: (window, FLOPs of a pair) for layers with sliding windows.
    """

    per_token: float
    per_pair: float
    windows: tuple[tuple[int, float], ...] = ()


def model_flops(config: Any) -> ModelFlops:
    """Count the FLOPs of a ``transformers`` configuration, or of a mapping or object with the same attributes.

    Covers dense and mixture-of-experts decoders, grouped queries, gated and plain feed-forward blocks, multi-head
    latent attention and sliding windows. The head counts whether or not it is tied to the embedding.

    Raises:
        InvalidInput: the model type is unknown, or the configuration lacks an attribute.
    """
    shape = _Shape(config)
    layers = shape.number("num_hidden_layers")
    per_token = 2.0 * shape.number("hidden_size") * shape.number("vocab_size")
    pair, projections = _attention(shape)
    per_pair = 0.0
    windows: dict[int, float] = {}
    for layer in range(layers):
        per_token += projections + _feed_forward(shape, layer)
        window = _window(shape, layer)
        if window is None:
            per_pair += pair
        else:
            windows[window] = windows.get(window, 0.0) + pair
    return ModelFlops(per_token=per_token, per_pair=per_pair, windows=tuple(sorted(windows.items())))


class _Shape:
    """Attributes of a configuration, looked up by name; a missing one is an error that names it."""

    def __init__(self, config: Any) -> None:
        self.config: Any = config
        self.config = self.get("text_config", config)
        self.model_type = str(self.get("model_type", ""))
        if self.model_type not in GATED | PLAIN:
            rule = f"be one of the known shapes {sorted(GATED | PLAIN)}"
            other = "or pass TransformerCost(linear, quadratic), with linear = 6 × hidden size × quadratic if dense"
            remedy = f"{nearest(self.model_type, GATED | PLAIN)}; {other}"
            raise InvalidInput(must("model_type", rule, self.model_type, remedy))

    def get(self, name: str, default: Any = None) -> Any:
        found: Any = getattr(self.config, name, None)
        if isinstance(self.config, Mapping):
            found = cast("Mapping[str, Any]", self.config).get(name)
        return default if found is None else found

    def number(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            remedy = "pass the model's transformers configuration"
            rule = "be a whole number of at least 1"
            raise InvalidInput(must(f"{self.model_type} config.{name}", rule, value, remedy))
        return value


def _attention(shape: _Shape) -> tuple[float, float]:
    """FLOPs of a pair of tokens, and of a token's projections, in one layer."""
    hidden, heads = shape.number("hidden_size"), shape.number("num_attention_heads")
    if shape.get("kv_lora_rank") is not None:
        return _latent_attention(shape, hidden, heads)
    kv_heads = shape.get("num_key_value_heads", heads)
    width = shape.get("head_dim", hidden // heads)
    projections = 2.0 * hidden * width * (2 * heads + 2 * kv_heads)
    return 4.0 * heads * width, projections


def _latent_attention(shape: _Shape, hidden: int, heads: int) -> tuple[float, float]:
    """Multi-head latent attention as DeepSeek-V2 and V3 train it, without absorbed projections."""
    rank, rope = shape.number("kv_lora_rank"), shape.number("qk_rope_head_dim")
    nope, value = shape.number("qk_nope_head_dim"), shape.number("v_head_dim")
    query = heads * (nope + rope)
    query_rank = shape.get("q_lora_rank")
    weights = hidden * query if query_rank is None else query_rank * (hidden + query)
    weights += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    return 2.0 * heads * (nope + rope + value), 2.0 * weights


def _feed_forward(shape: _Shape, layer: int) -> float:
    """FLOPs of a token in the feed-forward block of one layer, over its active experts."""
    hidden = shape.number("hidden_size")
    matrices = 3 if shape.model_type in GATED else 2
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts: int | None = next((shape.get(name) for name in names if shape.get(name)), None)
    if experts is None or not _is_sparse(shape, layer):
        return 2.0 * matrices * hidden * shape.number("intermediate_size")
    active = shape.number("num_experts_per_tok")
    width = shape.get("moe_intermediate_size") or shape.number("intermediate_size")
    shared = shape.get("n_shared_experts", 0) * width
    gate = 0
    if shape.get("shared_expert_intermediate_size"):
        shared, gate = shape.number("shared_expert_intermediate_size"), hidden
    return 2.0 * (matrices * hidden * (active * width + shared) + hidden * experts + gate)


def _is_sparse(shape: _Shape, layer: int) -> bool:
    if shape.model_type.startswith("deepseek"):
        first, every = shape.get("first_k_dense_replace", 0), shape.get("moe_layer_freq", 1)
        return layer >= first and layer % every == 0
    if layer in shape.get("mlp_only_layers", []):
        return False
    return (layer + 1) % shape.get("decoder_sparse_step", 1) == 0


def _window(shape: _Shape, layer: int) -> int | None:
    """Sliding window of a layer, or None for full attention."""
    window = shape.get("sliding_window")
    if window is None or shape.get("use_sliding_window", True) is False:
        return None
    kinds = shape.get("layer_types")
    if kinds is not None:
        return window if kinds[layer] == "sliding_attention" else None
    if shape.model_type in {"mistral", "mixtral", "phi3", "starcoder2"}:
        return window
    rule, remedy = "tell which layers use the sliding_window", "pass the configuration as transformers builds it"
    raise InvalidInput(must(f"{shape.model_type} config.layer_types", rule, None, remedy))
