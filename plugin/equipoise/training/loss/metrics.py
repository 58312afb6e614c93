"""Metrics as sums and counts, merged over micro-batches, ranks and optimizer steps, and divided once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Union, cast

import torch
import torch.distributed as dist

from equipoise._checks import of_kind
from equipoise.errors import InvalidInput, must
from equipoise.together import device_of, gather_numbers, gather_texts
from equipoise.training.loss.sequences import flat, sequences_of

Scalar = Union[float, int, torch.Tensor]  # noqa: UP007 - evaluated at run time, on Python 3.10 too
"""A number, or a tensor of one element, which stays on its device until ``value`` is read."""


@dataclass(frozen=True)
class Metric:
    """A mean: ``Σ values / Σ counts``.

    Args:
        sum: sum of the values.
        count: how much was summed, at least 0: tokens, rows, or a share of an optimizer step.

    Raises:
        InvalidInput: the count is negative, or a tensor has more than one element.

    >>> (Metric(50.0, 100) + Metric(270.0, 900)).value
    0.32
    """

    sum: Scalar
    count: Scalar

    def __post_init__(self) -> None:
        object.__setattr__(self, "sum", _scalar("sum", self.sum))
        object.__setattr__(self, "count", _scalar("count", self.count))
        if not isinstance(self.count, torch.Tensor) and not self.count >= 0:
            raise InvalidInput(must("count", "be at least 0", self.count, "pass how much was summed"))

    @classmethod
    def of(cls, values: torch.Tensor, mask: torch.Tensor) -> Metric:
        """The mean of the values under the mask, summed in float64.

        Args:
            values: any shape, or jagged.
            mask: of the same shape.

        Raises:
            InvalidInput: shapes differ.

        >>> Metric.of(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1, 1, 0])).value
        2.0
        """
        sequences = sequences_of(mask)
        chosen = sequences.select(flat(values.detach(), mask, "values"))
        return cls(chosen.sum(dtype=torch.float64), sequences.chosen.sum())

    @staticmethod
    def max(value: Scalar) -> MaxMetric:
        """A maximum."""
        return MaxMetric(value)

    @staticmethod
    def min(value: Scalar) -> MinMetric:
        """A minimum."""
        return MinMetric(value)

    def merge(self, other: AnyMetric) -> Metric:
        """Merge with another metric.

        Raises:
            InvalidInput: ``other`` is of another kind.
        """
        same = _same_kind(self, other)
        return Metric(self.sum + same.sum, self.count + same.count)

    __add__ = merge

    @property
    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return float(self.count) == 0

    @property
    def value(self) -> float:
        """Sum / count; 0 if nothing was counted (:func:`metric_values` drops such metrics)."""
        return float(self.sum) / float(self.count) if not self.is_empty else 0.0


@dataclass(frozen=True)
class MaxMetric:
    """A maximum; ``-inf`` if nothing was merged.

    >>> (Metric.max(1.0) + Metric.max(3.0)).value
    3.0
    """

    largest: Scalar

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", _scalar("largest", self.largest))

    def merge(self, other: AnyMetric) -> MaxMetric:
        """Merge with another metric; raises like :meth:`Metric.merge`."""
        return MaxMetric(_larger(self.largest, _same_kind(self, other).largest))

    __add__ = merge

    @property
    def is_empty(self) -> bool:
        """True if nothing was merged."""
        return float(self.largest) == float("-inf")

    @property
    def value(self) -> float:
        """The largest."""
        return float(self.largest)


@dataclass(frozen=True)
class MinMetric:
    """A minimum; ``inf`` if nothing was merged.

    >>> (Metric.min(1.0) + Metric.min(3.0)).value
    1.0
    """

    smallest: Scalar

    def __post_init__(self) -> None:
        object.__setattr__(self, "smallest", _scalar("smallest", self.smallest))

    def merge(self, other: AnyMetric) -> MinMetric:
        """Merge with another metric; raises like :meth:`Metric.merge`."""
        return MinMetric(-_larger(-self.smallest, -_same_kind(self, other).smallest))

    __add__ = merge

    @property
    def is_empty(self) -> bool:
        """True if nothing was merged."""
        return float(self.smallest) == float("inf")

    @property
    def value(self) -> float:
        """The smallest."""
        return float(self.smallest)


AnyMetric = Union[Metric, MaxMetric, MinMetric]  # noqa: UP007 - as above
"""A metric of any kind; the kind is its class, never its name in a dictionary."""


def merge_metrics(parts: Iterable[Mapping[str, AnyMetric]]) -> dict[str, AnyMetric]:
    """Merge the metrics of several micro-batches or optimizer steps; a missing name counts nothing.

    Raises:
        InvalidInput: one name has metrics of two kinds.

    >>> merged = merge_metrics([{"kl": Metric(1.0, 10)}, {"kl": Metric(3.0, 10)}])
    >>> merged["kl"].value
    0.2
    """
    merged: dict[str, AnyMetric] = {}
    for part in parts:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
                continue
            if type(merged[name]) is not type(metric):
                rule = f"be a {type(merged[name]).__name__} everywhere"
                raise InvalidInput(must(f"metric {name!r}", rule, type(metric).__name__, "give each kind its own name"))
            merged[name] = merged[name].merge(metric)
    return merged


def metric_values(metrics: Mapping[str, AnyMetric], *, prefix: str = "") -> dict[str, float]:
    """Plain numbers for a tracker; metrics that counted nothing are dropped.

    >>> metric_values({"kl": Metric(1.0, 10), "none": Metric(0, 0)}, prefix="actor/")
    {'actor/kl': 0.1}
    """
    return {f"{prefix}{name}": metric.value for name, metric in metrics.items() if not metric.is_empty}


def reduce_metrics(metrics: Mapping[str, AnyMetric], *, group: Any = None) -> dict[str, AnyMetric]:
    """Merge over the ranks of ``group``: one all-reduce for all means, one for all maxima and minima.

    A small all-gather first checks that all ranks have the same names and kinds, so that a difference is an error on
    every rank and none keeps waiting.

    Args:
        metrics: this rank's, by name.
        group: process group of the ranks; None for this process alone.

    Returns:
        The same on every rank, sorted by name.

    Raises:
        InvalidInput: ranks differ in names or kinds, or a value is not a metric; raised on all ranks.
    """
    if group is None:
        names = list(_checked(metrics))
        return {name: metrics[name] for name in names}
    mine: list[_Sums] = []

    def part() -> tuple[int]:
        mine.append(_Sums.of(_checked(metrics), device_of(group)))
        return (_digest(mine[0].kinds),)

    digests = gather_numbers(part, count=1, group=group, doing="merging metrics")
    sums = mine[0]
    if any(digest != digests[0] for digest in digests):
        raise _difference(sums.kinds, group)
    for values, op in ((sums.means, dist.ReduceOp.SUM), (sums.extremes, dist.ReduceOp.MAX)):
        if values.numel():
            dist.all_reduce(values, op=op, group=group)
    return sums.metrics()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sums:
    """The metrics of a rank as two vectors, by kind and name.

    Attributes:
        kinds: class name of each metric, sorted by metric.
        means: sum and count of each mean, one after the other.
        extremes: the maxima and the negated minima.
    """

    kinds: dict[str, str]
    means: torch.Tensor
    extremes: torch.Tensor

    @classmethod
    def of(cls, metrics: Mapping[str, AnyMetric], device: torch.device) -> _Sums:
        means: list[Scalar] = []
        largest: list[Scalar] = []
        smallest: list[Scalar] = []
        for metric in metrics.values():
            if isinstance(metric, Metric):
                means += (metric.sum, metric.count)
            elif isinstance(metric, MaxMetric):
                largest.append(metric.largest)
            else:
                smallest.append(-metric.smallest)
        return cls(
            kinds={name: type(metric).__name__ for name, metric in metrics.items()},
            means=_vector(means, device),
            extremes=_vector([*largest, *smallest], device),
        )

    def metrics(self) -> dict[str, AnyMetric]:
        means, extremes = iter(self.means), iter(self.extremes)
        found: dict[str, AnyMetric] = {}
        for kind in (Metric, MaxMetric, MinMetric):
            for name in (name for name, its in self.kinds.items() if its == kind.__name__):
                if kind is Metric:
                    found[name] = Metric(next(means), next(means))
                else:
                    value = next(extremes)
                    found[name] = MaxMetric(value) if kind is MaxMetric else MinMetric(-value)
        return {name: found[name] for name in self.kinds}


def _checked(metrics: Mapping[str, AnyMetric]) -> dict[str, AnyMetric]:
    """The metrics sorted by name.

    Raises:
        InvalidInput: a value is not a metric.
    """
    found = {str(name): metrics[name] for name in sorted(metrics, key=str)}
    for name, metric in found.items():
        of_kind(f"metric {name!r}", metric, (Metric, MaxMetric, MinMetric), "use Metric(sum, count)")
    return found


def _vector(values: list[Scalar], device: torch.device) -> torch.Tensor:
    if not values:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])


def _digest(kinds: dict[str, str]) -> int:
    return int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:7], "big")


def _difference(kinds: dict[str, str], group: Any) -> InvalidInput:
    """The error for ranks with other names or kinds, the same on all ranks."""
    texts = gather_texts(lambda: json.dumps(kinds), group=group, doing="comparing metrics")
    everyones = [set(cast("dict[str, str]", json.loads(text)).items()) for text in texts]
    common = set[tuple[str, str]].intersection(*everyones)
    rest = {rank: sorted(each - common) for rank, each in enumerate(everyones)}
    return InvalidInput(must("metrics", "have the same names and kinds on all ranks", rest, "log empty ones as (0, 0)"))


def _scalar(field: str, value: Scalar) -> Scalar:
    if not isinstance(value, torch.Tensor):
        of_kind(field, value, Real, "pass a number, or a tensor of one")
        return value
    if value.numel() != 1:
        raise InvalidInput(must(field, "be one number", tuple(value.shape), "sum it first, or use Metric.of"))
    value = value.detach().reshape(())
    if value.dtype in (torch.float16, torch.bfloat16):
        return value.float()  # half-precision sums would stop growing at a few thousand
    return value if value.is_floating_point() else value.long()


def _larger(a: Scalar, b: Scalar) -> Scalar:
    device = next((x.device for x in (a, b) if isinstance(x, torch.Tensor)), None)
    if device is None:
        return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
    return torch.maximum(*(torch.as_tensor(x, dtype=torch.float64, device=device) for x in (a, b)))


def _same_kind(mine: Any, other: Any) -> Any:
    if type(mine) is not type(other):
        remedy = "merge means with means, largest with largest"
        raise InvalidInput(must("other", f"be a {type(mine).__name__}", type(other).__name__, remedy))
    return other
