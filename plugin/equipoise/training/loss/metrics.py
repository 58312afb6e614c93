"""Numbers to log: sums and counts, merged over micro-batches, ranks and optimizer steps, divided once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Union, cast

import torch
import torch.distributed as dist

from equipoise._checks import of_kind
from equipoise.errors import InvalidInput, must
from equipoise.training.loss.collective import device_of
from equipoise.training.loss.sequences import flat, sequences_of

Scalar = Union[float, int, torch.Tensor]  # noqa: UP007 - evaluated at run time, on Python 3.10 too
"""A number, or a tensor of one element: it stays on its device until ``value`` is asked for."""


@dataclass(frozen=True)
class Metric:
    """A mean: ``Σ values / Σ counts``.

    Args:
        sum: sum of what is averaged.
        count: how much was summed, at least 0: tokens, rows, or a share of an optimizer step.

    Raises:
        InvalidInput: a negative count, or a tensor of more than one element.

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
        """The values where the mask is not 0, summed in float64.

        Args:
            values: any shape, or jagged.
            mask: of the same shape.

        Raises:
            InvalidInput: shapes that differ.

        >>> Metric.of(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1, 1, 0])).value
        2.0
        """
        sequences = sequences_of(mask)
        chosen = sequences.select(flat(values.detach(), mask, "values"))
        return cls(chosen.sum(dtype=torch.float64), sequences.chosen.sum())

    @staticmethod
    def max(value: Scalar) -> MaxMetric:
        """The largest of what is merged."""
        return MaxMetric(value)

    @staticmethod
    def min(value: Scalar) -> MinMetric:
        """The smallest of what is merged."""
        return MinMetric(value)

    def merge(self, other: AnyMetric) -> Metric:
        """Both together.

        Raises:
            InvalidInput: ``other`` is of another kind.
        """
        same = _same_kind(self, other)
        return Metric(self.sum + same.sum, self.count + same.count)

    __add__ = merge

    @property
    def is_empty(self) -> bool:
        """True where nothing was counted."""
        return float(self.count) == 0

    @property
    def value(self) -> float:
        """Sum / count; 0 where nothing was counted (:func:`metric_values` leaves such metrics out)."""
        return float(self.sum) / float(self.count) if not self.is_empty else 0.0


@dataclass(frozen=True)
class MaxMetric:
    """The largest of what is merged; ``-inf`` is nothing.

    >>> (Metric.max(1.0) + Metric.max(3.0)).value
    3.0
    """

    largest: Scalar

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", _scalar("largest", self.largest))

    def merge(self, other: AnyMetric) -> MaxMetric:
        """Both together; raises as :meth:`Metric.merge` does."""
        return MaxMetric(_larger(self.largest, _same_kind(self, other).largest))

    __add__ = merge

    @property
    def is_empty(self) -> bool:
        """True where there was nothing to take the largest of."""
        return float(self.largest) == float("-inf")

    @property
    def value(self) -> float:
        """The largest."""
        return float(self.largest)


@dataclass(frozen=True)
class MinMetric:
    """The smallest of what is merged; ``inf`` is nothing.

    >>> (Metric.min(1.0) + Metric.min(3.0)).value
    1.0
    """

    smallest: Scalar

    def __post_init__(self) -> None:
        object.__setattr__(self, "smallest", _scalar("smallest", self.smallest))

    def merge(self, other: AnyMetric) -> MinMetric:
        """Both together; raises as :meth:`Metric.merge` does."""
        return MinMetric(-_larger(-self.smallest, -_same_kind(self, other).smallest))

    __add__ = merge

    @property
    def is_empty(self) -> bool:
        """True where there was nothing to take the smallest of."""
        return float(self.smallest) == float("inf")

    @property
    def value(self) -> float:
        """The smallest."""
        return float(self.smallest)


AnyMetric = Union[Metric, MaxMetric, MinMetric]  # noqa: UP007 - as above
"""A metric of any kind; the kind is its class, never its name in a dictionary."""


def merge_metrics(parts: Iterable[Mapping[str, AnyMetric]]) -> dict[str, AnyMetric]:
    """Metrics of several micro-batches or optimizer steps as one; what one of them lacks counts nothing there.

    Raises:
        InvalidInput: two kinds under one name.

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
    """Plain numbers for a tracker; metrics that counted nothing are left out.

    >>> metric_values({"kl": Metric(1.0, 10), "none": Metric(0, 0)}, prefix="actor/")
    {'actor/kl': 0.1}
    """
    return {f"{prefix}{name}": metric.value for name, metric in metrics.items() if not metric.is_empty}


def reduce_metrics(metrics: Mapping[str, AnyMetric], *, group: Any = None) -> dict[str, AnyMetric]:
    """Merge over the ranks of ``group``: one all-reduce for all means, one for all largest and smallest.

    A small all-reduce before them tells whether all ranks have the same names and kinds, so that a difference is an
    error on every rank and none is left waiting.

    Args:
        metrics: this rank's, by name.
        group: process group of the ranks; None for this process alone.

    Returns:
        The same on every rank, sorted by name.

    Raises:
        InvalidInput: ranks differ in names or kinds, or a value is no metric; on all ranks alike.
    """
    kinds = {str(name): type(metrics[name]).__name__ for name in sorted(metrics, key=str)}
    if group is not None:
        _agree(kinds, group)
    for name, metric in metrics.items():
        if not isinstance(cast(object, metric), (Metric, MaxMetric, MinMetric)):
            raise InvalidInput(must(f"metric {name!r}", "be a Metric", type(metric).__name__, "use Metric(sum, count)"))
    if group is None:
        return {name: metrics[name] for name in kinds}
    device = device_of(group)
    means = {name: metric for name in kinds if isinstance(metric := metrics[name], Metric)}
    largest = {name: metric.largest for name in kinds if isinstance(metric := metrics[name], MaxMetric)}
    smallest = {name: -metric.smallest for name in kinds if isinstance(metric := metrics[name], MinMetric)}
    sums = _reduced([part for m in means.values() for part in (m.sum, m.count)], dist.ReduceOp.SUM, device, group)
    tops = _reduced([*largest.values(), *smallest.values()], dist.ReduceOp.MAX, device, group)
    found: dict[str, AnyMetric] = {}
    for i, name in enumerate(means):
        found[name] = Metric(sums[2 * i], sums[2 * i + 1])
    for i, name in enumerate(largest):
        found[name] = MaxMetric(tops[i])
    for i, name in enumerate(smallest, start=len(largest)):
        found[name] = MinMetric(-tops[i])
    return {name: found[name] for name in kinds}


def _reduced(values: list[Scalar], op: Any, device: torch.device, group: Any) -> torch.Tensor:
    if not values:
        return torch.zeros(0, dtype=torch.float64, device=device)
    flat = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    dist.all_reduce(flat, op=op, group=group)
    return flat


def _agree(kinds: dict[str, str], group: Any) -> None:
    """Raise on every rank unless all have the same names and kinds."""
    digest = hashlib.sha256(repr(kinds).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    bounds = torch.tensor([number, -number], device=device_of(group))
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    if int(bounds[0]) == -int(bounds[1]):
        return
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, kinds, group=group)
    common = set(kinds.items()).intersection(*(set(each.items()) for each in everyones))
    rest = {rank: sorted(set(each.items()) - common) for rank, each in enumerate(everyones)}
    raise InvalidInput(must("metrics", "have the same names and kinds on all ranks", rest, "log empty ones as (0, 0)"))


def _scalar(field: str, value: Scalar) -> Scalar:
    if not isinstance(value, torch.Tensor):
        of_kind(field, value, Real, "pass a number, or a tensor of one")
        return value
    if value.numel() != 1:
        raise InvalidInput(must(field, "be one number", tuple(value.shape), "sum it first, or use Metric.of"))
    value = value.detach().reshape(())
    if value.dtype in (torch.float16, torch.bfloat16):
        return value.float()  # as sums they would stop growing at a few thousand
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
