"""The options of a pass, checked against the engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.errors import InvalidInput, must
from equipoise.planning.step import StepPlan
from equipoise.training.engine.agreement import Ask
from equipoise.training.engine.base import LossFunction, PassOptions
from equipoise.training.engine.config import EngineConfig


def pass_options(loss_function: LossFunction | None, forward_only: bool, options: Mapping[str, Any]) -> PassOptions:
    """The options of a pass, which needs a loss function if it trains."""
    if loss_function is None and not forward_only:
        raise InvalidInput(must("loss_function", "be given for training", None, "pass forward_only=True for outputs"))
    return PassOptions(**options)


def requested(config: EngineConfig, asked: PassOptions) -> Ask:
    """The micro-batches of a pass without a plan: by its own options, else by the engine's configuration."""
    cap, rows = config.max_token_len_per_gpu, config.micro_batch_size_per_gpu
    if asked.max_token_len_per_gpu is not None or asked.micro_batch_size_per_gpu is not None:
        cap, rows = asked.max_token_len_per_gpu, asked.micro_batch_size_per_gpu
    if cap is None and rows is None:
        remedy = "set it, or micro_batch_size_per_gpu, in EngineConfig or for the pass"
        raise InvalidInput(must("max_token_len_per_gpu", "be given without a plan", None, remedy))
    return Ask.of(
        max_token_len=cap,
        micro_batch_size=rows,
        sp_size=config.sp_size,
        force_group_size=config.force_group_size,
        on_shortage=config.on_shortage,
        oversize=config.oversize,
    )


def check_cap(config: EngineConfig, plan: StepPlan) -> None:
    """Raise if the plan has micro-batches above the engine's cap."""
    limit = config.max_token_len_per_gpu
    alone = config.oversize == plan.spec.oversize == "alone"
    most = plan.spec.cap if alone else plan.stats.max_tokens
    if limit is not None and (most is None or most > limit * config.sp_size):
        rule = f"keep to the engine's cap of {limit * config.sp_size} tokens"
        raise InvalidInput(must("plan", rule, most, "plan with the engine's max_token_len_per_gpu and sp_size"))
