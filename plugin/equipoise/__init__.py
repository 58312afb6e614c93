"""Even work on every rank, the same loss on any cluster: step planning for RL post-training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not on first use, like the others: the room has the function's name, and whoever imported the room first would bind it
# to the module for good.
from equipoise.partition import partition as partition

if TYPE_CHECKING:
    from equipoise.batch import pad_batch as pad_batch
    from equipoise.batch import reorder as reorder
    from equipoise.batch import restore as restore
    from equipoise.config import EquipoiseConfig as EquipoiseConfig
    from equipoise.engine import BaseEngine as BaseEngine
    from equipoise.engine import EngineConfig as EngineConfig
    from equipoise.engine import EngineOutput as EngineOutput
    from equipoise.engine import EngineRegistry as EngineRegistry
    from equipoise.engine import OptimizerConfig as OptimizerConfig
    from equipoise.engine import engines as engines
    from equipoise.engine import prepare_micro_batches as prepare_micro_batches
    from equipoise.engine.log_probs import next_token_labels as next_token_labels
    from equipoise.engine.log_probs import token_log_probs as token_log_probs
    from equipoise.errors import EquipoiseError as EquipoiseError
    from equipoise.errors import EquipoiseWarning as EquipoiseWarning
    from equipoise.errors import InfeasiblePlan as InfeasiblePlan
    from equipoise.errors import InvalidInput as InvalidInput
    from equipoise.loss import AdvantageConfig as AdvantageConfig
    from equipoise.loss import AdvantageInputs as AdvantageInputs
    from equipoise.loss import Advantages as Advantages
    from equipoise.loss import LossDenominators as LossDenominators
    from equipoise.loss import Metric as Metric
    from equipoise.loss import PerToken as PerToken
    from equipoise.loss import PolicyConfig as PolicyConfig
    from equipoise.loss import PolicyInputs as PolicyInputs
    from equipoise.loss import PolicyLoss as PolicyLoss
    from equipoise.loss import SelectedTokens as SelectedTokens
    from equipoise.loss import advantage_estimators as advantage_estimators
    from equipoise.loss import agg_loss as agg_loss
    from equipoise.loss import compute_advantages as compute_advantages
    from equipoise.loss import group_mean as group_mean
    from equipoise.loss import kl_penalty as kl_penalty
    from equipoise.loss import local_mean as local_mean
    from equipoise.loss import merge_metrics as merge_metrics
    from equipoise.loss import metric_values as metric_values
    from equipoise.loss import policy_loss as policy_loss
    from equipoise.loss import policy_losses as policy_losses
    from equipoise.loss import reduce_metrics as reduce_metrics
    from equipoise.loss import rollout_weights as rollout_weights
    from equipoise.loss import sft_loss as sft_loss
    from equipoise.loss import value_loss as value_loss
    from equipoise.partition import pack as pack
    from equipoise.partition import packers as packers
    from equipoise.partition import partitioners as partitioners
    from equipoise.plan import PlanStats as PlanStats
    from equipoise.plan import StepPlan as StepPlan
    from equipoise.plan import StepSpec as StepSpec
    from equipoise.plan import padded_batch_size as padded_batch_size
    from equipoise.plan import plan_step as plan_step
    from equipoise.plan import required_batch_multiple as required_batch_multiple
    from equipoise.rollout.expect import LengthModel as LengthModel
    from equipoise.rollout.hf import DecodeConfig as DecodeConfig
    from equipoise.rollout.hf import DecodeEngine as DecodeEngine
    from equipoise.rollout.rebalance import plan_rebalance as plan_rebalance
    from equipoise.rollout.rebalancer import RolloutRebalancer as RolloutRebalancer
    from equipoise.rollout.rebalancer_config import RebalancerConfig as RebalancerConfig
    from equipoise.rollout.requests import Move as Move
    from equipoise.rollout.requests import Request as Request
    from equipoise.rollout.spread import spread_siblings as spread_siblings
    from equipoise.rollout.step_time import StepTime as StepTime
    from equipoise.rollout.transfer import MovableEngine as MovableEngine
    from equipoise.rollout.transfer import RequestState as RequestState
    from equipoise.rollout.transfer import Sampling as Sampling
    from equipoise.rollout.transfer.channel import RankLost as RankLost
    from equipoise.rollout.worth import TransferCost as TransferCost
    from equipoise.workload import CostModel as CostModel
    from equipoise.workload import FittedCost as FittedCost
    from equipoise.workload import PaddedCost as PaddedCost
    from equipoise.workload import TokenCost as TokenCost
    from equipoise.workload import TransformerCost as TransformerCost

_HOME = {
    "pad_batch": "equipoise.batch",
    "reorder": "equipoise.batch",
    "restore": "equipoise.batch",
    "EquipoiseConfig": "equipoise.config",
    "next_token_labels": "equipoise.engine.log_probs",
    "token_log_probs": "equipoise.engine.log_probs",
    "BaseEngine": "equipoise.engine",
    "EngineConfig": "equipoise.engine",
    "EngineOutput": "equipoise.engine",
    "EngineRegistry": "equipoise.engine",
    "OptimizerConfig": "equipoise.engine",
    "engines": "equipoise.engine",
    "prepare_micro_batches": "equipoise.engine",
    "EquipoiseError": "equipoise.errors",
    "EquipoiseWarning": "equipoise.errors",
    "InfeasiblePlan": "equipoise.errors",
    "InvalidInput": "equipoise.errors",
    "AdvantageConfig": "equipoise.loss",
    "AdvantageInputs": "equipoise.loss",
    "Advantages": "equipoise.loss",
    "LossDenominators": "equipoise.loss",
    "Metric": "equipoise.loss",
    "PerToken": "equipoise.loss",
    "PolicyConfig": "equipoise.loss",
    "PolicyInputs": "equipoise.loss",
    "PolicyLoss": "equipoise.loss",
    "SelectedTokens": "equipoise.loss",
    "advantage_estimators": "equipoise.loss",
    "agg_loss": "equipoise.loss",
    "compute_advantages": "equipoise.loss",
    "group_mean": "equipoise.loss",
    "kl_penalty": "equipoise.loss",
    "local_mean": "equipoise.loss",
    "merge_metrics": "equipoise.loss",
    "metric_values": "equipoise.loss",
    "policy_loss": "equipoise.loss",
    "policy_losses": "equipoise.loss",
    "reduce_metrics": "equipoise.loss",
    "rollout_weights": "equipoise.loss",
    "sft_loss": "equipoise.loss",
    "value_loss": "equipoise.loss",
    "pack": "equipoise.partition",
    "packers": "equipoise.partition",
    "partitioners": "equipoise.partition",
    "PlanStats": "equipoise.plan",
    "StepPlan": "equipoise.plan",
    "StepSpec": "equipoise.plan",
    "padded_batch_size": "equipoise.plan",
    "plan_step": "equipoise.plan",
    "required_batch_multiple": "equipoise.plan",
    "LengthModel": "equipoise.rollout.expect",
    "plan_rebalance": "equipoise.rollout.rebalance",
    "Move": "equipoise.rollout.requests",
    "Request": "equipoise.rollout.requests",
    "spread_siblings": "equipoise.rollout.spread",
    "StepTime": "equipoise.rollout.step_time",
    "TransferCost": "equipoise.rollout.worth",
    "CostModel": "equipoise.workload",
    "FittedCost": "equipoise.workload",
    "PaddedCost": "equipoise.workload",
    "TokenCost": "equipoise.workload",
    "TransformerCost": "equipoise.workload",
    "DecodeConfig": "equipoise.rollout.hf",
    "DecodeEngine": "equipoise.rollout.hf",
    "RolloutRebalancer": "equipoise.rollout.rebalancer",
    "RebalancerConfig": "equipoise.rollout.rebalancer_config",
    "MovableEngine": "equipoise.rollout.transfer",
    "RequestState": "equipoise.rollout.transfer",
    "Sampling": "equipoise.rollout.transfer",
    "RankLost": "equipoise.rollout.transfer.channel",
}

__version__ = "0.1.0"
__all__ = [
    "AdvantageConfig",
    "AdvantageInputs",
    "Advantages",
    "BaseEngine",
    "CostModel",
    "DecodeConfig",
    "DecodeEngine",
    "EngineConfig",
    "EngineOutput",
    "EngineRegistry",
    "EquipoiseConfig",
    "EquipoiseError",
    "EquipoiseWarning",
    "FittedCost",
    "InfeasiblePlan",
    "InvalidInput",
    "LengthModel",
    "LossDenominators",
    "Metric",
    "MovableEngine",
    "Move",
    "OptimizerConfig",
    "PaddedCost",
    "PerToken",
    "PlanStats",
    "PolicyConfig",
    "PolicyInputs",
    "PolicyLoss",
    "RankLost",
    "RebalancerConfig",
    "Request",
    "RequestState",
    "RolloutRebalancer",
    "Sampling",
    "SelectedTokens",
    "StepPlan",
    "StepSpec",
    "StepTime",
    "TokenCost",
    "TransferCost",
    "TransformerCost",
    "__version__",
    "advantage_estimators",
    "agg_loss",
    "compute_advantages",
    "engines",
    "group_mean",
    "kl_penalty",
    "local_mean",
    "merge_metrics",
    "metric_values",
    "next_token_labels",
    "pack",
    "packers",
    "pad_batch",
    "padded_batch_size",
    "partition",
    "partitioners",
    "plan_rebalance",
    "plan_step",
    "policy_loss",
    "policy_losses",
    "prepare_micro_batches",
    "reduce_metrics",
    "reorder",
    "required_batch_multiple",
    "restore",
    "rollout_weights",
    "sft_loss",
    "spread_siblings",
    "token_log_probs",
    "value_loss",
]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used, so that ``import equipoise`` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
