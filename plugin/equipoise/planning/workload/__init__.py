"""Cost of a row from its length."""

from equipoise._checks import as_lengths
from equipoise.planning.workload.cost import CostModel, TokenCost, TransformerCost, row_costs
from equipoise.planning.workload.fitted import FittedCost
from equipoise.planning.workload.padded import MicroBatchCost, PaddedCost

__all__ = [
    "CostModel",
    "FittedCost",
    "MicroBatchCost",
    "PaddedCost",
    "TokenCost",
    "TransformerCost",
    "as_lengths",
    "row_costs",
]
