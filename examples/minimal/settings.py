"""The settings of the minimal trainer: this dataclass is the one home of their defaults and rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import equipoise as eq
from equipoise.errors import InvalidConfig, must, nearest
from examples.minimal.task import NUM_HEADS, PROMPT_TOKENS

CONF = str(Path(__file__).parent / "conf")
"""Folder of the presets, for Hydra."""
FREE_TO_CHANGE = ("out", "engine", "dp", "sp", "steps", "save_every", "max_token_len_per_gpu")
"""Settings that move no number of a step, so that a run may be gone on with under others."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is.

    Args:
        out: folder of the run; one that holds a run already is gone on with.
        engine: backend of all engines, by its name in ``equipoise.engines``: "ddp" or "fsdp2".
        dp: ranks with different rows.
        sp: ranks that share the tokens of a row (Ulysses); torchrun starts ``dp · sp`` processes.
        algorithm: "grpo" (advantages within the rollouts of a prompt) or "ppo" (GAE with a critic).
        sft_steps: optimizer steps on right answers before RL; 0 for RL from random weights.
        sft_rows: rows of each of them.
        steps: RL steps.
        prompts: prompts of an RL step.
        rollouts: responses to each prompt.
        rollout: what samples them: "generate" (HF's own) or "decode" (``eq.DecodeEngine``, requests move).
        mini_batches: optimizer steps of an RL step.
        max_new_tokens: longest response, in tokens.
        max_token_len_per_gpu: tokens that one rank may hold in a micro-batch.
        lr: learning rate of the policy in RL.
        critic_lr: of the value head and its backbone.
        sft_lr: of the policy before RL.
        kl_coef: weight of the KL term towards the policy that RL began with; 0 for none, without a reference engine.
        dtype: of weights, in training and in rollout.
        save_every: RL steps from one checkpoint to the next.
        seed: of weights, prompts and rollouts.

    Raises:
        InvalidConfig: a value breaks its rule, or two exclude each other.
    """

    out: str = "outputs/minimal"
    engine: str = "fsdp2"
    dp: int = 2
    sp: int = 1
    algorithm: str = "grpo"
    sft_steps: int = 225
    sft_rows: int = 64
    steps: int = 100
    prompts: int = 32
    rollouts: int = 8
    rollout: str = "generate"
    mini_batches: int = 4
    max_new_tokens: int = 7
    max_token_len_per_gpu: int = 2048
    lr: float = 3e-4
    critic_lr: float = 1e-3
    sft_lr: float = 3e-3
    kl_coef: float = 0.0
    dtype: str = "float32"
    save_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        one_or_more = ("dp", "sp", "sft_rows", "steps", "prompts", "rollouts", "mini_batches", "max_new_tokens")
        for name in (*one_or_more, "save_every", "max_token_len_per_gpu"):
            if getattr(self, name) < 1:
                raise InvalidConfig(must(name, "be at least 1", getattr(self, name), "pass a whole number"))
        for name in ("sft_steps", "lr", "critic_lr", "sft_lr", "kl_coef", "seed"):
            if getattr(self, name) < 0:
                raise InvalidConfig(must(name, "be at least 0", getattr(self, name), "pass a number from 0 up"))
        backends = sorted({backend for kind, backend, *_ in eq.engines.entries() if kind == "language_model"})
        for name, options in (
            ("engine", backends),
            ("algorithm", ["grpo", "ppo"]),
            ("rollout", ["generate", "decode"]),
            ("dtype", ["float32", "float64", "bfloat16"]),
        ):
            value = getattr(self, name)
            if value not in options:
                raise InvalidConfig(must(name, f"be one of {options}", value, nearest(value, options)))
        if self.algorithm == "grpo" and self.rollouts < 2:
            raise InvalidConfig(must("rollouts", "be at least 2 with algorithm=grpo", self.rollouts, "or use ppo"))
        if NUM_HEADS % self.sp:
            legal = _divisors(NUM_HEADS)
            raise InvalidConfig(must("sp", f"divide the model's {NUM_HEADS} heads", self.sp, f"legal values: {legal}"))
        if self.num_rows % self.mini_batches:
            rule = f"divide prompts · rollouts = {self.num_rows}"
            legal = _divisors(self.num_rows)
            raise InvalidConfig(must("mini_batches", rule, self.mini_batches, f"legal values: {legal}"))
        if self.dp > min(self.num_rows // self.mini_batches, self.sft_rows):
            rows = min(self.num_rows // self.mini_batches, self.sft_rows)
            rule = f"be at most the {rows} rows of an optimizer step"
            raise InvalidConfig(must("dp", rule, self.dp, "raise prompts or sft_rows, or use fewer mini_batches"))
        longest = PROMPT_TOKENS + self.max_new_tokens
        if self.max_token_len_per_gpu * self.sp < longest:
            rule = f"be at least {-(-longest // self.sp)}, to hold the longest row with sp = {self.sp}"
            raise InvalidConfig(must("max_token_len_per_gpu", rule, self.max_token_len_per_gpu, "raise it"))

    def check_world(self, num_processes: int) -> None:
        """Raise unless there are as many processes as the settings ask for."""
        if num_processes != self.dp * self.sp:
            rule = f"be the {num_processes} processes that were started"
            remedy = "set dp and sp, or torchrun's --nproc-per-node"
            raise InvalidConfig(must("dp · sp", rule, self.dp * self.sp, remedy))

    def engine_config(self, model_type: str, lr: float | None) -> eq.EngineConfig:
        """Of an engine of the run; without a learning rate one that never trains."""
        return eq.EngineConfig(
            model_type=model_type,
            backend=self.engine,
            sp_size=self.sp,
            max_token_len_per_gpu=self.max_token_len_per_gpu,
            dtype=cast(Any, self.dtype),
            optimizer=None if lr is None else eq.OptimizerConfig(lr=lr, weight_decay=0.0),
        )

    def step_spec(self, mini_batches: int) -> eq.StepSpec:
        """What the plan of a step must satisfy."""
        return eq.StepSpec(
            dp_size=self.dp,
            sp_size=self.sp,
            num_mini_batches=mini_batches,
            max_token_len_per_gpu=self.max_token_len_per_gpu,
        )

    @property
    def num_rows(self) -> int:
        """Responses of an RL step."""
        return self.prompts * self.rollouts

    @classmethod
    def of(cls, config: Any) -> Settings:
        """From Hydra's node."""
        return cls(**cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True)))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


_node = OmegaConf.structured(Settings)
OmegaConf.set_readonly(_node, None)  # frozen for the trainer, but Hydra has overrides to put in
ConfigStore.instance().store(name="settings", node=_node)
