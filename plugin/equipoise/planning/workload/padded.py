"""Cost of a micro-batch for engines that pad every row to the longest one instead of packing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from equipoise._arrays import FloatArray
from equipoise._checks import as_lengths
from equipoise.errors import InvalidInput, must
from equipoise.planning.workload.cost import CostModel, TransformerCost


@runtime_checkable
class MicroBatchCost(Protocol):
    """A cost model that is not additive: it also gives the cost of rows that are padded together.

    A micro-batch costs no less than its rows cost alone.
    """

    def __call__(self, lengths: Any) -> FloatArray:
        """Cost of each row alone."""
        ...

    def micro_batch(self, lengths: Any) -> float:
        """Cost of these rows in one micro-batch."""
        ...


@dataclass(frozen=True)
class PaddedCost:
    """Cost of a micro-batch = its rows × the cost of its longest row.

    :func:`equipoise.plan_step` then minimizes this cost, and the cap limits padded tokens, rows × longest row. More
    micro-batches mean less padding, down to one row each; unless ``micro_batch_overhead`` puts a price on a
    micro-batch, plans stay near the fewest that fit under the cap.

    Bounds from the costs of single rows still hold, because a longer row never costs less than a shorter one.

    Args:
        model: cost of one row; must not decrease with its length.

    >>> cost = PaddedCost()
    >>> cost.micro_batch([1000, 10]) / cost.micro_batch([1000])
    2.0
    """

    model: CostModel = field(default_factory=TransformerCost)

    def __call__(self, lengths: Any) -> FloatArray:
        """Cost of each row alone, shape (n,)."""
        return np.asarray(self.model(lengths), dtype=np.float64)

    def micro_batch(self, lengths: Any) -> float:
        """Cost of these rows as one micro-batch, in the units of ``model``."""
        tokens = as_lengths(lengths)
        return tokens.size * float(self(tokens.max(keepdims=True))[0])


def micro_batch_cost(cost: MicroBatchCost, lengths: Any) -> float:
    """Call ``cost.micro_batch`` and check what it returns.

    Raises:
        InvalidInput: the cost is negative, NaN or infinite.
    """
    value = float(cost.micro_batch(lengths))
    if not 0 <= value < float("inf"):
        name = f"{type(cost).__name__}.micro_batch"
        raise InvalidInput(must(f"{name}(lengths)", "be finite and at least 0", value, "check the cost model"))
    return value
