"""The loss of supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.training.loss.denominators import LossDenominators
from equipoise.training.loss.metrics import AnyMetric
from equipoise.training.loss.sequences import flat
from equipoise.training.loss.share import Share


def sft_loss(
    log_prob: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    denominators: LossDenominators | None = None,
    dp_size: int = 1,
    loss_scale_factor: float | None = None,
    segment_ids: torch.Tensor | None = None,
    is_padding: Any = None,
    prefix: str = "sft/",
) -> tuple[torch.Tensor, dict[str, AnyMetric]]:
    """One micro-batch's share of an optimizer step's negative log-likelihood, ``l = -log_prob``.

    Args:
        log_prob: log-probs of the target tokens, shape (rows, width), or jagged; gradients flow through it.
        loss_mask: nonzero where a token is trained on, at the position of its log-prob.
        loss_agg_mode: see :func:`equipoise.agg_loss`.
        denominators: of the whole optimizer step; None for those of this call, on one rank.
        dp_size: data-parallel ranks whose gradients are averaged.
        loss_scale_factor: constant horizon of "seq-mean-token-sum-norm".
        segment_ids: for rows with several sequences; 0 for none.
        is_padding: shape (rows,); True for rows to exclude whatever their mask.
        prefix: prefix of the metric's name.

    Returns:
        The share, and ``loss`` (per optimizer step). Masked positions and padding rows affect neither.

    Raises:
        InvalidInput: denominators or a horizon is missing, or shapes differ.

    >>> sft_loss(torch.tensor([[-1.0, -2.0, float("nan")]]), torch.tensor([[1, 1, 0]]))[0].item()
    1.5
    """
    share = Share.of(
        loss_mask,
        loss_agg_mode,
        denominators=denominators,
        dp_size=dp_size,
        loss_scale_factor=loss_scale_factor,
        segment_ids=segment_ids,
        is_padding=is_padding,
    )
    loss = share.loss(-flat(log_prob, loss_mask, "log_prob"))
    return loss, {f"{prefix}loss": share.metric(loss)}
