"""A pass over this rank's micro-batches: its results and errors, and how the ranks share them."""

# torch.distributed and tensordict are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict

from equipoise.errors import InvalidInput, must
from equipoise.together import HeldBack, gather_numbers, gather_texts
from equipoise.training.engine.base import EngineOutput, LossFunction
from equipoise.training.engine.microbatches import MicroBatches
from equipoise.training.loss import LossDenominators
from equipoise.training.loss.metrics import AnyMetric, MaxMetric, Metric, MinMetric, merge_metrics

_EMPTY: dict[str, AnyMetric] = {
    "Metric": Metric(0.0, 0),
    "MaxMetric": MaxMetric(-math.inf),
    "MinMetric": MinMetric(math.inf),
}
Columns = dict[str, torch.Tensor]


class Pass:
    """A pass on this rank.

    If ranks synchronize in forward and backward, a rank that raised alone would leave the others waiting. So a rank
    keeps the first error of its own (in its rows, in the loss function) and continues with a loss of exactly 0; all
    ranks raise the error at the end of the pass.

    Args:
        loss_function: None to compute only outputs.
        training: whether to compute gradients.
        dp_group: passed to the loss function.
    """

    def __init__(self, loss_function: LossFunction | None, *, training: bool, dp_group: Any) -> None:
        self.held = HeldBack()
        self.num_counted = 0
        self._loss_function = loss_function
        self._training = training
        self._dp_group = dp_group
        self._outputs: list[Columns] = []
        self._metrics: list[Mapping[str, AnyMetric]] = []
        self._total: torch.Tensor | float = 0.0

    def loss(self, columns: Columns, micro_batch: TensorDict, rows: Any) -> torch.Tensor:
        """The micro-batch's share, attached to every output so that backward runs through all weights.

        Args:
            columns: the outputs.
            micro_batch: passed to the loss function.
            rows: indices of its rows; a micro-batch without any has no loss.
        """
        nothing = _nothing(columns)
        loss = nothing
        if len(rows) and self._loss_function is not None:
            loss = self.held.run(lambda: self._share(columns, micro_batch) + nothing, instead=nothing)
        self._total = self._total + loss.detach()
        self._outputs.append({name: column.detach() for name, column in columns.items()})
        return loss

    def _share(self, columns: Columns, micro_batch: TensorDict) -> torch.Tensor:
        if self._training:
            self.num_counted += _num_counted(micro_batch)
        assert self._loss_function is not None
        given: Any = self._loss_function(columns, micro_batch, self._dp_group)
        share, logged = _checked_loss(given, training=self._training)
        self._metrics.append(logged)
        return share

    def meet(self, micro_batches: MicroBatches | None) -> tuple[EngineOutput, int]:
        """End the pass on all ranks: one all-gather, and two more if only some ranks have metrics.

        Args:
            micro_batches: those that ran; None if there were none.

        Returns:
            The output, and the counted tokens over all ranks.

        Raises:
            EquipoiseError: any rank failed; raised on every rank.
        """
        results: list[tuple[TensorDict, dict[str, AnyMetric]]] = []

        def part() -> Sequence[int]:
            self.held.release()
            assert micro_batches is not None
            results.append((micro_batches.restore(self._outputs), merge_metrics(self._metrics)))
            return _bits(float(self._total)), int(not results[0][1]), self.num_counted

        world = dist.group.WORLD
        try:
            everyones = gather_numbers(part, count=3, group=world, doing="running micro-batches")
        finally:
            self.held.error = None
        model_output, metrics = results[0]
        losses, nameless, counted = zip(*everyones, strict=True)
        if self._loss_function is None:
            return EngineOutput(loss=None, metrics={}, model_output=model_output), sum(counted)
        if any(nameless) and not all(nameless):
            metrics = _with_names_of_others(metrics)
        loss = sum(map(_number, losses)) / len(losses)
        return EngineOutput(loss=loss, metrics=metrics, model_output=model_output), sum(counted)


def _with_names_of_others(metrics: dict[str, AnyMetric]) -> dict[str, AnyMetric]:
    """Metrics under the same names on all ranks, because a rank without rows has none."""
    kinds = {name: type(metric).__name__ for name, metric in metrics.items()}
    texts = gather_texts(lambda: json.dumps(kinds), group=dist.group.WORLD, doing="naming metrics")
    if metrics:
        return metrics
    everyones: list[dict[str, str]] = [json.loads(text) for text in texts]
    return {name: _EMPTY[kind] for known in everyones for name, kind in known.items()}


def _num_counted(micro_batch: TensorDict) -> int:
    """Tokens under the mask; without a mask, the rows."""
    mask = micro_batch.get("loss_mask", None)
    if not isinstance(mask, torch.Tensor):
        return len(micro_batch)
    return LossDenominators.of(mask, is_padding=micro_batch.get("is_padding", None)).num_tokens


def _checked_loss(given: Any, *, training: bool) -> tuple[torch.Tensor, Mapping[str, AnyMetric]]:
    """Check the result of a loss function: a share attached to the outputs, and metrics that merge."""
    parts: tuple[Any, ...] = cast("tuple[Any, ...]", given) if isinstance(given, tuple) else (given,)
    if len(parts) != 2 or not isinstance(parts[0], torch.Tensor) or not isinstance(parts[1], Mapping):
        got = [type(part).__name__ for part in parts]
        rule = "return (loss, metrics): a tensor and a mapping of names to eq.Metric"
        raise InvalidInput(must("loss_function", rule, got, "return (loss, {}) if there is nothing to log"))
    share, metrics = cast("tuple[torch.Tensor, Mapping[str, AnyMetric]]", parts)
    if training and not share.requires_grad:
        remedy = "compute it from the outputs it is given, without detach"
        raise InvalidInput(must("loss", "be attached to the model's outputs", "a detached tensor", remedy))
    for name, metric in metrics.items():
        if type(metric).__name__ not in _EMPTY:
            remedy = "use eq.Metric(sum, count), Metric.max or Metric.min"
            raise InvalidInput(must(f"metrics[{name!r}]", "be a metric that merges", metric, remedy))
    return share, metrics


def _nothing(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """0, attached to the graph, with gradients of exactly 0 even if a column is NaN or infinite."""
    parts: list[torch.Tensor] = []
    for column in columns.values():
        flat: torch.Tensor = cast(Any, column).values()
        parts.append(torch.where(torch.zeros_like(flat, dtype=torch.bool), flat, torch.zeros_like(flat)).sum())
    return torch.stack([part.double() for part in parts]).sum()


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
