"""The settings of an engine and the only place for their defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from equipoise._checks import numbers, of_kind, positive
from equipoise.errors import InvalidInput, must, nearest

OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine"]
DTypeName = Literal["float64", "float32", "bfloat16"]
GradientSync = Literal["last", "each"]
OnShortage = Literal["error", "zero_weight"]
Oversize = Literal["error", "alone"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of the optimizer and its schedule.

    Args:
        name: "adamw" or "sgd".
        lr: peak learning rate.
        weight_decay: decoupled for AdamW, added to the gradient for SGD.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        momentum: SGD's momentum.
        max_grad_norm: clip the global gradient norm to this; None for no clipping.
        schedule: "constant", or "linear" or "cosine" from ``lr`` down to ``min_lr_ratio · lr`` at ``total_steps``.
        warmup_steps: steps of linear warm-up to ``lr``.
        total_steps: length of the schedule; required unless constant.
        min_lr_ratio: final learning rate, as a share of ``lr``.

    Raises:
        InvalidInput: a value breaks its rule.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    max_grad_norm: float | None = 1.0
    schedule: ScheduleName = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        _one_of("name", self.name, get_args(OptimizerName))
        _one_of("schedule", self.schedule, get_args(ScheduleName))
        limit = [] if self.max_grad_norm is None else ["max_grad_norm"]
        remedy = "fix the optimizer's settings"
        numbers(self, whole=["warmup_steps"], real=["lr", "momentum", "weight_decay", "eps", *limit], remedy=remedy)
        if self.lr < 0:
            raise InvalidInput(must("lr", "be at least 0", self.lr, "use a small positive number"))
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise InvalidInput(must("max_grad_norm", "be above 0", self.max_grad_norm, "use None for no clipping"))
        if self.warmup_steps < 0:
            raise InvalidInput(must("warmup_steps", "be at least 0", self.warmup_steps, "use 0 for no warm-up"))
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            rule = f"be above warmup_steps = {self.warmup_steps} with schedule {self.schedule!r}"
            raise InvalidInput(must("total_steps", rule, self.total_steps, "pass the optimizer steps of the run"))

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counting from 0.

        >>> rates = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2, total_steps=6)
        >>> [rates.lr_at(step) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        share = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Which engine to build and how to run it.

    Args:
        model_type: "language_model" (log-probs) or "value_model" (values); more by registration.
        backend: "fsdp2" or "ddp"; more by registration.
        device: "cpu", "cuda", "npu"; None for ``EQUIPOISE_DEVICE`` or the detected one.
        vendor: "nvidia", "amd", …; None for ``EQUIPOISE_VENDOR`` or the detected one.
        max_token_len_per_gpu: token cap of a micro-batch, times ``sp_size``; without a plan.
        micro_batch_size_per_gpu: rows of a micro-batch, instead of the cap; without a plan.
        sp_size: ranks that share a row's tokens (Ulysses); the data-parallel size is world size ÷ ``sp_size``.
        force_group_size: neighboring rows that stay together; must divide ``micro_batch_size_per_gpu``.
        on_shortage: whether a rank with fewer rows than micro-batches is an "error" or runs "zero_weight" ones.
        oversize: whether a row above the cap is an "error" or its own micro-batch ("alone").
        dtype: dtype of the optimizer's weights.
        param_dtype: dtype of the weights in forward and backward; None for ``dtype``.
        reduce_dtype: dtype of gradient sums over micro-batches and ranks (fsdp2); None for ``dtype``.
        gradient_sync: reduce gradients at the "last" micro-batch of a step or at "each" (fsdp2: less memory).
        reshard_after_forward: free a block's gathered weights after its forward (fsdp2).
        gradient_checkpointing: recompute activations in the backward.
        offload_params: keep weights in host memory outside ``train_mode`` and ``eval_mode``.
        offload_optimizer: keep optimizer states in host memory outside ``train_mode``.
        log_prob_chunk_tokens: the most tokens whose logits exist at once; None for 32 MiB of logits on a CPU and 512
            MiB elsewhere.
        optimizer: see :class:`OptimizerConfig`; None for an engine that never trains (a reference model).

    Raises:
        InvalidInput: a value breaks its rule, or two settings conflict.
    """

    model_type: str = "language_model"
    backend: str = "fsdp2"
    device: str | None = None
    vendor: str | None = None
    max_token_len_per_gpu: int | None = None
    micro_batch_size_per_gpu: int | None = None
    sp_size: int = 1
    force_group_size: int = 1
    on_shortage: OnShortage = "error"
    oversize: Oversize = "error"
    dtype: DTypeName = "float32"
    param_dtype: DTypeName | None = None
    reduce_dtype: DTypeName | None = None
    gradient_sync: GradientSync = "last"
    reshard_after_forward: bool = True
    gradient_checkpointing: bool = False
    offload_params: bool = False
    offload_optimizer: bool = False
    log_prob_chunk_tokens: int | None = None
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        check_micro_batches(self.max_token_len_per_gpu, self.micro_batch_size_per_gpu)
        positive("sp_size", self.sp_size, "use 1 without sequence parallelism")
        together = positive("force_group_size", self.force_group_size, "use 1 for rows that may be separated")
        if self.micro_batch_size_per_gpu is not None and self.micro_batch_size_per_gpu % together:
            rule = f"be a multiple of force_group_size = {together}"
            raise InvalidInput(must("micro_batch_size_per_gpu", rule, self.micro_batch_size_per_gpu, "count rows"))
        if self.log_prob_chunk_tokens is not None:
            positive("log_prob_chunk_tokens", self.log_prob_chunk_tokens, "use None for a size that suits the device")
        if self.optimizer is not None:
            of_kind("optimizer", self.optimizer, OptimizerConfig, "pass equipoise.OptimizerConfig(...), or None")
        _one_of("dtype", self.dtype, get_args(DTypeName))
        for name in ("param_dtype", "reduce_dtype"):
            _one_of(name, getattr(self, name), (None, *get_args(DTypeName)))
        _one_of("gradient_sync", self.gradient_sync, get_args(GradientSync))
        _one_of("on_shortage", self.on_shortage, get_args(OnShortage))
        _one_of("oversize", self.oversize, get_args(Oversize))


def check_micro_batches(max_token_len_per_gpu: int | None, micro_batch_size_per_gpu: int | None) -> None:
    """Refuse both micro-batch settings at once, and values below 1."""
    for name, value in (
        ("max_token_len_per_gpu", max_token_len_per_gpu),
        ("micro_batch_size_per_gpu", micro_batch_size_per_gpu),
    ):
        if value is not None:
            positive(name, value, "pass what one GPU holds in a micro-batch")
    if max_token_len_per_gpu is not None and micro_batch_size_per_gpu is not None:
        rule, remedy = "be None when max_token_len_per_gpu is given", "choose rows or the token cap"
        raise InvalidInput(must("micro_batch_size_per_gpu", rule, micro_batch_size_per_gpu, remedy))


def _one_of(name: str, value: Any, options: tuple[Any, ...]) -> None:
    if value not in options:
        known = [str(option) for option in options if option is not None]
        raise InvalidInput(must(name, f"be one of {list(options)}", value, nearest(str(value), known)))
