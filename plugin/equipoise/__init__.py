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
    from equipoise.errors import EquipoiseError as EquipoiseError
    from equipoise.errors import EquipoiseWarning as EquipoiseWarning
    from equipoise.errors import InfeasiblePlan as InfeasiblePlan
    from equipoise.errors import InvalidInput as InvalidInput
    from equipoise.loss import LossDenominators as LossDenominators
    from equipoise.loss import agg_loss as agg_loss
    from equipoise.partition import pack as pack
    from equipoise.partition import packers as packers
    from equipoise.partition import partitioners as partitioners
    from equipoise.plan import PlanStats as PlanStats
    from equipoise.plan import StepPlan as StepPlan
    from equipoise.plan import StepSpec as StepSpec
    from equipoise.plan import padded_batch_size as padded_batch_size
    from equipoise.plan import plan_step as plan_step
    from equipoise.plan import required_batch_multiple as required_batch_multiple
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
    "EquipoiseError": "equipoise.errors",
    "EquipoiseWarning": "equipoise.errors",
    "InfeasiblePlan": "equipoise.errors",
    "InvalidInput": "equipoise.errors",
    "LossDenominators": "equipoise.loss",
    "agg_loss": "equipoise.loss",
    "pack": "equipoise.partition",
    "packers": "equipoise.partition",
    "partitioners": "equipoise.partition",
    "PlanStats": "equipoise.plan",
    "StepPlan": "equipoise.plan",
    "StepSpec": "equipoise.plan",
    "padded_batch_size": "equipoise.plan",
    "plan_step": "equipoise.plan",
    "required_batch_multiple": "equipoise.plan",
    "CostModel": "equipoise.workload",
    "FittedCost": "equipoise.workload",
    "PaddedCost": "equipoise.workload",
    "TokenCost": "equipoise.workload",
    "TransformerCost": "equipoise.workload",
}

__version__ = "0.1.0"
__all__ = [
    "CostModel",
    "EquipoiseConfig",
    "EquipoiseError",
    "EquipoiseWarning",
    "FittedCost",
    "InfeasiblePlan",
    "InvalidInput",
    "LossDenominators",
    "PaddedCost",
    "PlanStats",
    "StepPlan",
    "StepSpec",
    "TokenCost",
    "TransformerCost",
    "__version__",
    "agg_loss",
    "pack",
    "packers",
    "pad_batch",
    "padded_batch_size",
    "partition",
    "partitioners",
    "plan_step",
    "reorder",
    "required_batch_multiple",
    "restore",
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
