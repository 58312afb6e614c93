"""Read verl's own keys as what a plan needs: one ``StepSpec`` per update and pass of a step."""

# OmegaConf nodes are untyped; the dataclass that receives each value checks it.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from equipoise.config import EquipoiseConfig
from equipoise.errors import InvalidConfig, must
from equipoise.planning.step import StepSpec
from equipoise.planning.workload import CostModel, TokenCost, TransformerCost

logger = logging.getLogger("equipoise")

Stage = Literal["actor", "critic", "old_log_prob", "ref", "values"]

_ENGINE_NODES = ("fsdp_config", "fsdp", "megatron", "veomni", "torchtitan", "automodel")
_SP_KEYS = {"megatron": "context_parallel_size", "torchtitan": "tensor_parallel_size"}
_LEAST_ROW = {"fsdp": 2, "fsdp2": 2}  # tokens of a padding row; other engines keep verl's number
VERL_ROW_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """How verl runs one update or pass.

    Attributes:
        mini_batch_rows: rows of an optimizer step; None for a pass, which takes the whole batch at once.
        cap: tokens that one GPU may hold, or None with fixed micro-batches.
        micro_rows: rows of a fixed micro-batch, or None with the cap.
        sp_size: GPUs that share a row.
        micro_batch_multiple: of interleaved pipelines.
        shuffle: whether the workers redraw mini-batches.
        cap_key: config key of the cap or size, for messages.
    """

    mini_batch_rows: int | None
    cap: int | None
    micro_rows: int | None
    sp_size: int
    micro_batch_multiple: int
    shuffle: bool
    cap_key: str

    def spec(self, config: EquipoiseConfig, *, dp_size: int, rows: int) -> StepSpec:
        """The spec of a batch of ``rows`` rows over ``dp_size`` ranks."""
        return StepSpec(
            dp_size=dp_size,
            num_mini_batches=1 if self.mini_batch_rows is None else rows // self.mini_batch_rows,
            max_token_len_per_gpu=self.cap,
            micro_batch_size_per_gpu=self.micro_rows,
            sp_size=self.sp_size,
            micro_batch_multiple=self.micro_batch_multiple,
            composition=config.composition if self.mini_batch_rows is not None else "keep",
            algorithm=config.algorithm,
            objective=config.objective,
            oversize=config.oversize,
            seed=config.seed,
        )


def cost_model(config: EquipoiseConfig, verl: Any) -> CostModel:
    """The configured cost model; with cost=fitted, the fallback for steps without a good fit.

    Raises:
        InvalidInput: cost=model, and the actor's model has an unknown shape.
    """
    if config.cost == "token":
        return TokenCost()
    if config.cost == "model":
        return _model_cost(verl)
    if config.cost == "fitted":
        try:
            return _model_cost(verl)
        except (OSError, ValueError) as error:  # not found, or an unknown shape
            logger.warning("equipoise: cost=fitted falls back to cost_linear and cost_quadratic: %s", error)
    return TransformerCost(linear=config.cost_linear, quadratic=config.cost_quadratic)


def _model_cost(verl: Any) -> TransformerCost:
    from transformers import AutoConfig

    model = verl.actor_rollout_ref.model
    path = model.get("hf_config_path", None) or model.path
    found = AutoConfig.from_pretrained(path, trust_remote_code=bool(model.get("trust_remote_code", False)))
    return TransformerCost.from_model_config(found)


def stage_settings(config: Any, stage: Stage) -> StageSettings:
    """Read what verl 0.9.1's v1 trainer will pass to the engine of ``stage``.

    Sources: verl/workers/engine_workers.py:539-645 for actor and reference; verl/trainer/ppo/v1/trainer_base.py:266 for
    the critic, whose engine uses ``ppo_infer_max_token_len_per_gpu`` for both, so the cap here is the smaller of it and
    the documented key.
    """
    if stage in ("critic", "values"):
        return _critic_settings(config, update=stage == "critic")
    rollout = config.actor_rollout_ref.rollout
    role = config.actor_rollout_ref.ref if stage == "ref" else config.actor_rollout_ref.actor
    if stage == "actor":
        source, dynamic = role, bool(role.use_dynamic_bsz)
        cap_name, rows_name, where = "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "actor"
    else:
        source = role if stage == "ref" else rollout
        dynamic = bool(source.get("log_prob_use_dynamic_bsz", False))
        cap_name, rows_name = "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu"
        where = "ref" if stage == "ref" else "rollout"
    fixed = source.get(rows_name, None)
    if not dynamic and fixed is None:
        raise InvalidConfig(
            must(
                f"actor_rollout_ref.{where}.{rows_name}",
                "be given without dynamic micro-batches",
                None,
                f"set it, or actor_rollout_ref.actor.use_dynamic_bsz=True with {cap_name}",
            )
        )
    engine_key, engine = engine_node(role)
    return StageSettings(
        mini_batch_rows=int(role.ppo_mini_batch_size) * int(rollout.n) if stage == "actor" else None,
        cap=int(source.get(cap_name)) if dynamic else None,
        micro_rows=None if dynamic else int(fixed),
        sp_size=_sp_size(role, engine_key, engine),
        micro_batch_multiple=_pipeline_multiple(engine_key, engine),
        shuffle=stage == "actor" and bool(role.get("shuffle", False)),
        cap_key=f"actor_rollout_ref.{where}.{cap_name if dynamic else rows_name}",
    )


def _critic_settings(config: Any, *, update: bool) -> StageSettings:
    critic = config.critic
    engine_key, engine = engine_node(critic)
    dynamic = bool(engine.get("use_dynamic_bsz", True))
    documented = "ppo_max_token_len_per_gpu" if update else "forward_max_token_len_per_gpu"
    cap = min(int(critic.get("ppo_infer_max_token_len_per_gpu", 32768)), int(critic.get(documented, 32768)))
    fixed = engine.get("micro_batch_size_per_gpu" if update else "infer_micro_batch_size_per_gpu", None)
    return StageSettings(
        mini_batch_rows=int(critic.ppo_mini_batch_size) * int(config.actor_rollout_ref.rollout.n) if update else None,
        cap=cap if dynamic else None,
        micro_rows=None if dynamic else int(fixed),
        sp_size=_sp_size(critic, engine_key, engine),
        micro_batch_multiple=_pipeline_multiple(engine_key, engine),
        shuffle=update and bool(critic.get("shuffle", False)),
        cap_key=f"critic.{documented}",
    )


def engine_node(role: Any) -> tuple[str, Any]:
    """Name and node of the engine settings in a role's configuration."""
    strategy = str(role.get("strategy", "fsdp"))
    for key in _ENGINE_NODES:
        node = role.get(key, None)
        if node is not None and (strategy.startswith("fsdp") == key.startswith("fsdp")):
            return key, node
    return "", {}


def least_row_tokens(config: EquipoiseConfig, verl: Any) -> int:
    """Tokens of a padding row: the configured number, or the minimum that every engine of the run accepts."""
    if config.min_row_tokens is not None:
        return config.min_row_tokens
    strategies = {str(verl.actor_rollout_ref.actor.get("strategy", "fsdp"))}
    critic = verl.get("critic", None)
    if critic is not None and critic.get("enable", None):
        strategies.add(str(critic.get("strategy", "fsdp")))
    return max(_LEAST_ROW.get(strategy, VERL_ROW_TOKENS) for strategy in strategies)


def _sp_size(role: Any, engine_key: str, engine: Any) -> int:
    key = _SP_KEYS.get(engine_key, "ulysses_sequence_parallel_size")
    old = int(role.get("ulysses_sequence_parallel_size", 1) or 1) if engine_key.startswith("fsdp") else 1
    return max(old, int(engine.get(key, 1) or 1))


def _pipeline_multiple(engine_key: str, engine: Any) -> int:
    """Interleaved Megatron pipelines need a multiple of a group of micro-batches, by default the pipeline's size."""
    if engine_key != "megatron" or int(engine.get("virtual_pipeline_model_parallel_size", 0) or 0) < 2:
        return 1
    override = engine.get("override_transformer_config", None) or {}
    group = override.get("microbatch_group_size_per_vp_stage", None)
    return int(group or engine.get("pipeline_model_parallel_size", 1) or 1)
