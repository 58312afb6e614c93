"""Tiny models, rows and losses for engines, and what one plain process makes of them, row by row."""

# transformers is typed in part only.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig, Qwen2Config

from equipoise import LossDenominators, PolicyConfig, PolicyInputs, agg_loss, policy_loss, policy_losses
from equipoise.training.engine.config import OptimizerConfig
from equipoise.training.loss.metrics import AnyMetric, Metric

VOCABULARY = 37
LENGTHS = (5, 9, 3, 12, 7, 4, 11, 6)
CAP = 16
OPTIMIZER = OptimizerConfig(
    lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, schedule="linear", warmup_steps=2, total_steps=6
)
KINDS = ("language_model", "value_model")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def hf_config(name: str) -> Any:
    """Tiny Llama (grouped heads), or Qwen2 (biases, tied embeddings)."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**sizes) if name == "llama" else Qwen2Config(**sizes, tie_word_embeddings=True)


def hf_model(name: str, dtype: str = "float64", seed: int = 0) -> Any:
    """The causal language model with weights that depend on the seed only."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(hf_config(name), dtype=DTYPES[dtype])


def row(number: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens, mask (a prompt of one or two tokens), weights and returns of a row; by its number only."""
    draw = torch.Generator().manual_seed(1000 + number)
    mask = torch.ones(length, dtype=torch.int64)
    mask[: 1 + number % 2] = 0
    return {
        "input_ids": torch.randint(0, VOCABULARY, (length,), generator=draw),
        "loss_mask": mask,
        "advantages": torch.randn(length, generator=draw, dtype=torch.float64),
        "returns": torch.randn(length, generator=draw, dtype=torch.float64),
    }


def batch(numbers: Sequence[int], lengths: Sequence[int] = LENGTHS) -> TensorDict:
    """The rows of these numbers, jagged."""
    rows = [row(i, lengths[i]) for i in numbers]
    if not rows:
        return TensorDict({}, batch_size=[0])
    columns = {
        name: torch.nested.as_nested_tensor([one[name] for one in rows], layout=torch.jagged) for name in rows[0]
    }
    return TensorDict(columns, batch_size=[len(rows)])


def num_tokens(numbers: Sequence[int], lengths: Sequence[int] = LENGTHS) -> int:
    """Tokens that count."""
    return sum(int(row(i, lengths[i])["loss_mask"].sum()) for i in numbers)


@dataclass
class CountingLoss:
    """Token-mean policy-gradient or squared value loss over all ranks; remembers which rows it was asked about."""

    tokens: int
    dp_size: int
    asked: list[int] = field(default_factory=list[int])

    def __call__(
        self, output: dict[str, torch.Tensor], data: TensorDict, group: Any
    ) -> tuple[torch.Tensor, Mapping[str, AnyMetric]]:
        flat: dict[str, torch.Tensor] = {name: cast(Any, column).values() for name, column in data.items()}
        self.asked.append(int(data.batch_size[0]))
        if "values" in output:
            each = (cast(Any, output["values"]).values() - flat["returns"]) ** 2
        else:
            each = -flat["advantages"] * cast(Any, output["log_probs"]).values()
        loss = agg_loss(
            each[None], flat["loss_mask"][None], "token-mean", dp_size=self.dp_size, batch_num_tokens=self.tokens
        )
        return loss, {"per_token": Metric.of(each, flat["loss_mask"])}


@dataclass(frozen=True, kw_only=True)
class PolicyStep:
    """A policy loss of the registry, with a KL term and an entropy bonus, as a driver passes it in."""

    name: str
    mode: str
    denominators: LossDenominators
    dp_size: int

    def __call__(
        self, output: dict[str, torch.Tensor], data: TensorDict, group: Any
    ) -> tuple[torch.Tensor, Mapping[str, AnyMetric]]:
        inputs = PolicyInputs(
            log_prob=output["log_probs"],
            old_log_prob=data["old"],
            ref_log_prob=data["returns"] - 3.0,
            entropy=output["entropy"],
            advantages=data["advantages"],
            loss_mask=data["loss_mask"],
            is_padding=data["is_padding"],
        )
        return policy_loss(
            self.name,
            inputs,
            PolicyConfig(kl_coef=0.1, entropy_coef=0.01),
            loss_agg_mode=self.mode,
            denominators=self.denominators,
            dp_size=self.dp_size,
            loss_scale_factor=12.0,
        )


POLICY_STEPS = [(name, mode) for name in policy_losses for mode in policy_losses[name].agg_modes]


def policy_batch(numbers: Sequence[int], num_padding: int = 0) -> TensorDict:
    """The rows of these numbers, off policy, and padding rows whose masks were left at 1."""
    rows: list[dict[str, Any]] = []
    for i in numbers:
        one = row(i, LENGTHS[i])
        rows.append({**one, "old": -one["returns"].abs() - 2.0})
    for _ in range(num_padding):
        two = torch.zeros(2, dtype=torch.float64)
        ids = two.long()
        rows.append({"input_ids": ids, "loss_mask": ids + 1, "advantages": two + 9, "returns": two, "old": two})
    columns = {
        name: torch.nested.as_nested_tensor([one[name] for one in rows], layout=torch.jagged) for name in rows[0]
    }
    is_padding = torch.tensor([False] * len(numbers) + [True] * num_padding)
    return TensorDict({**columns, "is_padding": is_padding}, batch_size=[len(rows)])


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What training steps and a last pass of one plain process gave."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    outputs: list[dict[str, torch.Tensor]]


def _columns(model: Any, kind: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs about each token of a row, 0 at its first."""
    logits = model(input_ids=ids[None]).logits[0]
    zero = logits.new_zeros(1)
    if kind == "value_model":
        return {"values": torch.cat([zero, logits[:-1, 0]])}
    log_p = torch.log_softmax(logits[:-1], -1)
    chosen = log_p.gather(-1, ids[1:, None])[:, 0]
    return {"log_probs": torch.cat([zero, chosen]), "entropy": torch.cat([zero, -(log_p.exp() * log_p).sum(-1)])}


@cache
def reference(
    kind: str, name: str, *, steps: int = 2, dtype: str = "float64", numbers: tuple[int, ...] = tuple(range(8))
) -> Reference:
    """Train the model of ``kind`` for ``steps`` steps on the same rows with HF, autograd and AdamW alone."""
    model = start(kind, name, dtype)
    rows = [row(i, LENGTHS[i]) for i in numbers]
    total = num_tokens(numbers)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )
    losses: list[float] = []
    norms: list[float] = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = (0.5e-2, 1e-2, 1e-2, 0.75e-2, 0.5e-2, 0.25e-2)[step]
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for one in rows:
            columns = _columns(model, kind, one["input_ids"])
            if kind == "value_model":
                each = (columns["values"] - one["returns"]) ** 2
            else:
                each = -one["advantages"] * columns["log_probs"]
            loss = loss + (each * one["loss_mask"]).sum() / total
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).detach()))
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        outputs = [_columns(model, kind, one["input_ids"]) for one in rows]
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return Reference(losses=losses, norms=norms, weights=weights, outputs=outputs)


def start(kind: str, name: str, dtype: str = "float64") -> Any:
    """The HF model that an engine of ``kind`` starts from; a value model's head is that of :func:`value_head`."""
    causal = hf_model(name, dtype)
    if kind == "language_model":
        return causal
    config = hf_config(name)
    config.num_labels, config.classifier_dropout = 1, 0.0
    model = AutoModelForTokenClassification.from_config(config, dtype=DTYPES[dtype])
    model.model.load_state_dict(causal.model.state_dict())
    with torch.no_grad():
        model.score.weight.copy_(value_head())
        model.score.bias.zero_()
    return model.eval()


def value_head() -> torch.Tensor:
    """Weights of the value head, shape (1, width)."""
    return torch.randn(1, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 0.3
