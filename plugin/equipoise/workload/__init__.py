"""Cost of a row from its length."""

from equipoise.workload.cost import CostModel, TokenCost, TransformerCost, as_lengths, row_costs

__all__ = ["CostModel", "TokenCost", "TransformerCost", "as_lengths", "row_costs"]
