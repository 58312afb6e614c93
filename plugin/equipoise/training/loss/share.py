"""A micro-batch's share of an optimizer step's losses, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from equipoise.errors import InvalidInput, must
from equipoise.training.loss.aggregation import aggregate
from equipoise.training.loss.denominators import LossDenominators
from equipoise.training.loss.metrics import Metric
from equipoise.training.loss.sequences import Sequences, sequences_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """How the losses of one micro-batch are aggregated.

    Attributes:
        sequences: the tokens that count.
        loss_agg_mode: see :func:`equipoise.agg_loss`.
        denominators: those of the whole optimizer step.
        dp_size: data-parallel ranks whose gradients are averaged.
        loss_scale_factor: constant horizon of the norm mode.
    """

    sequences: Sequences
    loss_agg_mode: str
    denominators: LossDenominators
    dp_size: int
    loss_scale_factor: float | None

    @classmethod
    def of(
        cls,
        loss_mask: torch.Tensor,
        loss_agg_mode: str,
        *,
        denominators: LossDenominators | None,
        dp_size: int,
        loss_scale_factor: float | None,
        segment_ids: torch.Tensor | None,
        is_padding: Any,
    ) -> Share:
        """The share of a micro-batch with this mask; on one rank, its own denominators by default.

        Raises:
            InvalidInput: there is more than one rank but no denominators, or shapes do not match.
        """
        if denominators is None:
            if dp_size > 1:
                remedy = "count over all ranks (LossDenominators.of)"
                raise InvalidInput(must("denominators", f"be given with dp_size = {dp_size}", None, remedy))
            denominators = LossDenominators.of(loss_mask, is_padding=is_padding, segment_ids=segment_ids)
        return cls(
            sequences=sequences_of(loss_mask, segment_ids=segment_ids, is_padding=is_padding),
            loss_agg_mode=loss_agg_mode,
            denominators=denominators,
            dp_size=dp_size,
            loss_scale_factor=loss_scale_factor,
        )

    def loss(self, loss_mat: torch.Tensor) -> torch.Tensor:
        """The aggregated share of a loss per token, shape (rows, width)."""
        return aggregate(
            loss_mat,
            self.sequences,
            self.loss_agg_mode,
            dp_size=self.dp_size,
            batch_num_tokens=self.denominators.num_tokens,
            global_batch_size=self.denominators.num_rows,
            loss_scale_factor=self.loss_scale_factor,
        )

    def metric(self, share: torch.Tensor) -> Metric:
        """A share as a metric whose value is the loss of one optimizer step, or the mean over several.

        Its count is the share of the step's tokens; the counts of a step's micro-batches and ranks add up to 1.
        """
        tokens = self.sequences.chosen.sum(dtype=torch.float64)
        return Metric(share.detach().double() / self.dp_size, tokens / max(self.denominators.num_tokens, 1))
