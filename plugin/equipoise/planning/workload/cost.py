"""Cost models: from lengths in tokens to float64 costs, in units that each model chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from equipoise._arrays import FloatArray, IntArray
from equipoise._checks import as_lengths, finite, numbers, positive
from equipoise.errors import InvalidInput, must
from equipoise.planning.workload.model_flops import model_flops


class CostModel(Protocol):
    """Anything that maps lengths, shape (n,), to float64 costs, shape (n,)."""

    def __call__(self, lengths: Any) -> FloatArray:
        """Cost of each row."""
        ...


def row_costs(cost: CostModel, lengths: IntArray) -> FloatArray:
    """Call ``cost`` and check what it returns: float64, one finite value of at least 0 per row.

    Raises:
        InvalidInput: the model returned another shape, or a value that is negative, NaN or infinite.
    """
    if not callable(cost):
        raise InvalidInput(must("cost", "be callable with lengths", cost, "pass TransformerCost() or another model"))
    values = np.asarray(cost(lengths), dtype=np.float64)
    name = type(cost).__name__
    if values.shape != lengths.shape:
        raise InvalidInput(must(f"{name}(lengths)", f"have shape {lengths.shape}", values.shape, "return one per row"))
    finite(f"{name}(lengths)", values, lambda row: f"check the model at length {int(lengths[row])}")
    return values


@dataclass(frozen=True)
class TokenCost:
    """Cost of a row = its tokens. Right for memory, and for time where attention is cheap.

    >>> TokenCost()([1000, 2])
    array([1000.,    2.])
    """

    def __call__(self, lengths: Any) -> FloatArray:
        """Tokens as float64, shape (n,)."""
        return as_lengths(lengths).astype(np.float64)


@dataclass(frozen=True)
class TransformerCost:
    """Cost of a row of length L = linear · L + quadratic · L².

    The defaults are verl 0.9.1's (``verl/utils/seqlen_balancing.py``, ``calculate_workload``): a dense transformer
    spends about 12·h²·L on its projections and 2·h·L² on attention, which for hidden size h = 4096 is proportional to
    24576·L + L². Everything is computed in float64: 32-bit integers overflow from L = 35,655 on.

    A layer with a sliding window of w tokens adds its coefficient times L² - max(0, L - w)², the pairs within the
    window.

    Args:
        linear: cost of one token, at least 0.
        quadratic: cost of one pair of tokens, at least 0.
        windows: (window, cost of one pair) for layers with sliding windows.

    >>> TransformerCost()([1, 1000000]).tolist()
    [24577.0, 1024576000000.0]
    """

    linear: float = 24576.0
    quadratic: float = 1.0
    windows: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        numbers(self, real=("linear", "quadratic"), remedy="use verl's 24576 and 1")
        for field, value in (("linear", self.linear), ("quadratic", self.quadratic)):
            if not 0 <= value < np.inf:
                raise InvalidInput(must(field, "be finite and at least 0", value, "use verl's 24576 and 1"))
        if self.linear == 0 and self.quadratic == 0:
            raise InvalidInput(must("linear", "be above 0 when quadratic is 0", 0, "a row must cost something"))

    def __call__(self, lengths: Any) -> FloatArray:
        """Costs as float64, shape (n,)."""
        tokens = as_lengths(lengths).astype(np.float64)
        cost = self.linear * tokens + self.quadratic * tokens * tokens
        for window, coefficient in self.windows:
            apart = np.maximum(tokens - window, 0.0)
            cost += coefficient * (tokens * tokens - apart * apart)
        return cost

    @classmethod
    def from_hidden_size(cls, hidden_size: int) -> TransformerCost:
        """Scale the default to another width: a token costs 6 · hidden size times as much as a pair of tokens.

        >>> TransformerCost.from_hidden_size(1024).linear
        6144.0
        """
        width = positive("hidden_size", hidden_size, "pass the model's hidden size")
        return cls(linear=6.0 * width, quadratic=1.0)

    @classmethod
    def from_model_config(cls, config: Any) -> TransformerCost:
        """FLOPs of a forward pass of this model (see :mod:`equipoise.planning.workload.model_flops`).

        Args:
            config: a ``transformers`` configuration, or a mapping with the same keys.

        Raises:
            InvalidInput: the model type is unknown, or the configuration lacks an attribute.
        """
        flops = model_flops(config)
        return cls(linear=flops.per_token, quadratic=flops.per_pair, windows=flops.windows)
