"""A model of decode-step time, fitted to measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np

from equipoise._arrays import FloatArray, IntArray
from equipoise._checks import as_lengths, as_vector, is_amount, is_whole
from equipoise.errors import InvalidInput, must

_FIT_FROM = 400  # samples per tier, because all pairs are evaluated
_FAR = 4.0  # outliers are this many standard deviations (from the median error) away


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a decode step = base of the tier + slope of the tier × KV tokens of the fullest rank.

    Times are interpolated between tiers; below the smallest tier, they are those of the smallest. Above the largest,
    requests take turns: time of the largest × tier / largest.

    Attributes:
        tiers: decode-graph sizes, ascending.
        base_s: seconds of each tier without context.
        s_per_token: additional seconds per KV token, at least 0.
        most_tokens: context beyond which time is constant.
        r2: share of the variance in seconds that the fit explains, outliers excluded; NaN if not fitted.
        num_samples: measured steps.
        num_outliers: steps that the fit excludes.

    >>> StepTime(tiers=(4, 64), base_s=(0.06, 0.12), s_per_token=(0.0, 1e-6))(64, 50_000)
    0.16999999999999998
    """

    tiers: tuple[int, ...]
    base_s: tuple[float, ...]
    s_per_token: tuple[float, ...]
    most_tokens: float = float("inf")
    r2: float = float("nan")
    num_samples: int = 0
    num_outliers: int = 0

    def __post_init__(self) -> None:
        tiers = _as_tuple(self.tiers)
        if not tiers or not all(is_whole(tier, 1) for tier in tiers) or any(a >= b for a, b in pairwise(tiers)):
            raise InvalidInput(must("tiers", "be at least 1 and rise", self.tiers, "sort them, each once"))
        if self.most_tokens != float("inf") and not is_amount(self.most_tokens):
            remedy = "leave it out if there is no limit"
            raise InvalidInput(must("most_tokens", "be at least 0", self.most_tokens, remedy))
        for name, values in (("base_s", self.base_s), ("s_per_token", self.s_per_token)):
            if len(_as_tuple(values)) != len(tiers) or not all(is_amount(value) for value in values):
                rule = f"have a finite value of at least 0 for each of {len(self.tiers)} tiers"
                raise InvalidInput(must(name, rule, values, "give one for each tier"))

    def __call__(self, tier: int, context_tokens: float) -> float:
        """Seconds of one step.

        Args:
            tier: size of the decode graph, in requests.
            context_tokens: KV tokens of the fullest rank.
        """
        times = [
            base + slope * min(context_tokens, self.most_tokens)
            for base, slope in zip(self.base_s, self.s_per_token, strict=True)
        ]
        largest = self.tiers[-1]
        return times[-1] * tier / largest if tier > largest else float(np.interp(tier, self.tiers, times))

    def of_tiers(self, tier_index: IntArray, context_tokens: FloatArray) -> FloatArray:
        """Seconds of many steps, shape (n,), given the index of each step's tier in ``tiers``."""
        context = np.minimum(context_tokens, self.most_tokens)
        return np.asarray(np.array(self.base_s)[tier_index] + np.array(self.s_per_token)[tier_index] * context)

    @classmethod
    def fit(cls, tiers: Any, context_tokens: Any, seconds: Any) -> StepTime:
        """Fit to measured steps: for each tier, the median slope over all pairs, then the median residual.

        Up to 29 % of a tier's samples may be outliers (a compilation, a stall) without much effect.

        Args:
            tiers: tier of each step, shape (n,).
            context_tokens: KV tokens of the fullest rank at each step, shape (n,).
            seconds: duration of each step, above 0, shape (n,).

        Raises:
            InvalidInput: shapes differ, a tier has fewer than 3 steps, or seconds are not finite and positive.

        Source: P. K. Sen, J. Am. Stat. Assoc. 63 (1968) 1379-1389.

        >>> model = StepTime.fit([8] * 4, [0, 100, 200, 300], [1.0, 1.1, 9.9, 1.3])
        >>> round(model(8, 500), 6), model.num_outliers
        (1.5, 1)
        """
        tier, context = as_lengths(tiers, field="tiers"), as_lengths(context_tokens, field="context_tokens")
        given = as_vector("seconds", seconds, "pass the seconds of each step")
        if given.dtype.kind not in "iuf":
            remedy = "pass the seconds of each step"
            raise InvalidInput(must("seconds", "be numbers", str(given.dtype), remedy))
        measured = given.astype(np.float64)
        if not tier.shape == context.shape == measured.shape:
            shapes = tier.shape, context.shape, measured.shape
            raise InvalidInput(must("seconds", "have one value for each tier and context", shapes, "pair them"))
        wrong = np.flatnonzero(~np.isfinite(measured) | (measured <= 0))
        if wrong.size:
            at = int(wrong[0])
            remedy = "drop the step or measure it again"
            raise InvalidInput(must(f"seconds[{at}]", "be finite and above 0", float(measured[at]), remedy))
        lines: Mapping[int, tuple[float, float]] = {
            value: _line(value, context[tier == value].astype(np.float64), measured[tier == value])
            for value in sorted(set(tier.tolist()))
        }
        predicted = np.array(
            [lines[t][0] + lines[t][1] * c for t, c in zip(tier.tolist(), context.tolist(), strict=True)]
        )
        kept = _near(measured - predicted, measured)
        return cls(
            tiers=tuple(lines),
            base_s=tuple(base for base, _ in lines.values()),
            s_per_token=tuple(slope for _, slope in lines.values()),
            r2=_explained(predicted[kept], measured[kept]),
            num_samples=measured.size,
            num_outliers=int((~kept).sum()),
        )


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(cast("Sequence[Any]", values)) if isinstance(values, Sequence) else ()


def _line(tier: int, context: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Base and slope of one tier, both at least 0."""
    if context.size < 3:
        raise InvalidInput(must(f"steps of tier {tier}", "be at least 3", context.size, "measure more of them"))
    if context.size > _FIT_FROM:
        chosen = np.linspace(0, context.size - 1, _FIT_FROM).astype(np.int64)
        context, seconds = context[chosen], seconds[chosen]
    first, second = np.triu_indices(context.size, 1)
    run = context[second] - context[first]
    apart = run != 0
    slope = 0.0
    if apart.any():
        slope = max(float(np.median((seconds[second] - seconds[first])[apart] / run[apart])), 0.0)
    return max(float(np.median(seconds - slope * context)), 0.0), slope


def _near(errors: FloatArray, measured: FloatArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    spread = 1.4826 * float(np.median(np.abs(errors)))
    return np.abs(errors) <= max(_FAR * spread, 1e-9 * float(np.median(measured)))


def _explained(predicted: FloatArray, measured: FloatArray) -> float:
    total = float(((measured - measured.mean()) ** 2).sum())
    left = float(((measured - predicted) ** 2).sum())
    if total <= 1e-18 * float((measured**2).sum()):
        return 1.0 if left <= 1e-12 * float((measured**2).sum()) else 0.0
    return 1.0 - left / total
