"""A cost model fitted to measured micro-batch times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise._arrays import BoolArray, FloatArray
from equipoise._checks import as_lengths, finite
from equipoise.errors import InvalidInput, must

_ROUNDS = 30
_TUKEY = 4.685  # 95 % efficient on normal noise: Holland and Welsch, Comm. Stat. A6(9), 1977


@dataclass(frozen=True, kw_only=True)
class FittedCost:
    """Seconds of a call ≈ per_call + linear · ΣL + quadratic · ΣL², fitted to measured calls.

    As a cost model it returns each row's share, linear · L + quadratic · L², in seconds.

    Attributes:
        linear: seconds per token, at least 0.
        quadratic: seconds per pair of tokens of one row, at least 0.
        per_call: fixed seconds per call, at least 0.
        r2: share of the variance in seconds that the fit explains, outliers excluded.
        num_calls: measured calls.
        num_outliers: calls that the fit excludes.
    """

    linear: float
    quadratic: float
    per_call: float
    r2: float
    num_calls: int
    num_outliers: int

    def __call__(self, lengths: Any) -> FloatArray:
        """Seconds of each row, shape (n,).

        Raises:
            InvalidInput: in the calls it was fitted to, time did not grow with tokens.
        """
        if self.linear == 0 and self.quadratic == 0:
            rule = "have a coefficient above 0 to tell rows apart"
            raise InvalidInput(must("FittedCost", rule, self, "measure calls with other lengths, or use another model"))
        return self._of_rows(lengths)

    def seconds(self, lengths: Any) -> float:
        """Predicted seconds for one call with these rows."""
        return self.per_call + float(self._of_rows(lengths).sum())

    def _of_rows(self, lengths: Any) -> FloatArray:
        tokens = as_lengths(lengths).astype(np.float64)
        return self.linear * tokens + self.quadratic * tokens * tokens

    @classmethod
    def fit(cls, row_lengths_per_call: Sequence[Any], seconds: Any) -> FittedCost:
        """Fit to calls, given the lengths of each call's rows and the seconds it took.

        Non-negative least squares, reweighted by Tukey's biweight so that outliers (a compilation, a stall) do not
        count.

        Args:
            row_lengths_per_call: tokens of each row, for each of at least 3 calls.
            seconds: duration of each call, above 0.

        Raises:
            InvalidInput: too few calls, mismatched shapes, or seconds that are not finite and positive.

        >>> calls = [[100], [1000], [2000, 500], [3000]]
        >>> fitted = FittedCost.fit(calls, [0.1 + sum(1e-3 * n for n in rows) for rows in calls])
        >>> round(fitted.linear, 6), round(fitted.per_call, 6), round(fitted.r2, 6)
        (0.001, 0.1, 1.0)
        """
        measured = np.asarray(seconds, dtype=np.float64)
        calls = len(row_lengths_per_call)
        if measured.shape != (calls,):
            rule = f"have one value for each of {calls} calls"
            raise InvalidInput(must("seconds", rule, measured.shape, "pair them"))
        if calls < 3:
            raise InvalidInput(must("row_lengths_per_call", "hold at least 3 calls", calls, "measure more calls"))
        finite("seconds", measured, "drop the call or measure it again", above=True)
        features = np.empty((calls, 3))
        for i, rows in enumerate(row_lengths_per_call):
            tokens = as_lengths(rows, field=f"row_lengths_per_call[{i}]").astype(np.float64)
            features[i] = 1.0, tokens.sum(), (tokens * tokens).sum()
        weight = _robust_weights(features, measured)
        per_call, linear, quadratic = _non_negative(features, measured, weight).tolist()
        kept = weight > 0
        return cls(
            linear=linear,
            quadratic=quadratic,
            per_call=per_call,
            r2=_explained(features[kept] @ np.array([per_call, linear, quadratic]), measured[kept]),
            num_calls=calls,
            num_outliers=int((~kept).sum()),
        )


def _robust_weights(features: FloatArray, measured: FloatArray) -> FloatArray:
    """Tukey's biweights, started from absolute errors; exactly 0 for an outlier."""
    weight = np.ones(measured.size)
    for turn in range(_ROUNDS):
        errors = np.abs(measured - features @ _non_negative(features, measured, weight))
        scale = float(np.median(errors)) / 0.6745
        floor = 1e-9 * float(np.median(measured))
        if scale <= floor:  # more than half fit exactly
            return (errors <= max(floor, 1e-6 * float(np.median(measured)))).astype(np.float64)
        if turn < _ROUNDS // 2:
            weight = 1.0 / np.maximum(errors, scale * 1e-3)
        else:
            far = errors / (_TUKEY * scale)
            weight = np.where(far < 1, (1 - far**2) ** 2, 0.0)
    return weight


def _non_negative(features: FloatArray, measured: FloatArray, weight: FloatArray) -> FloatArray:
    """Weighted least squares with three non-negative coefficients: the best of the eight faces."""
    root = np.sqrt(weight)
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    matrix, target = features / scale * root[:, None], measured * root
    best, least = np.zeros(3), float(target @ target)
    for free in itertools.product([False, True], repeat=3):
        use: BoolArray = np.array(free)
        found = np.zeros(3)
        found[use] = np.linalg.lstsq(matrix[:, use], target, rcond=None)[0] if use.any() else 0.0
        error = float(((matrix @ found - target) ** 2).sum())
        if (found >= 0).all() and error < least * (1 - 1e-12):
            best, least = found, error
    return best / scale


def _explained(predicted: FloatArray, measured: FloatArray) -> float:
    spread = float(((measured - measured.mean()) ** 2).sum())
    left = float(((measured - predicted) ** 2).sum())
    if spread <= 1e-18 * float((measured**2).sum()):
        return 1.0 if left <= 1e-12 * float((measured**2).sum()) else 0.0
    return 1.0 - left / spread
