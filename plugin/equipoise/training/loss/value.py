"""The loss of the value head."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.errors import InvalidInput, must
from equipoise.training.loss.denominators import LossDenominators
from equipoise.training.loss.metrics import AnyMetric, Metric
from equipoise.training.loss.sequences import flat
from equipoise.training.loss.share import Share


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    clip: float | None = 0.5,
    loss_agg_mode: str = "token-mean",
    denominators: LossDenominators | None = None,
    dp_size: int = 1,
    loss_scale_factor: float | None = None,
    segment_ids: torch.Tensor | None = None,
    is_padding: Any = None,
    prefix: str = "critic/",
) -> tuple[torch.Tensor, dict[str, AnyMetric]]:
    """One micro-batch's share of an optimizer step's clipped value loss.

    ::

        l = 1/2 · max((V - R)², (clip(V, V_old - clip, V_old + clip) - R)²)

    Masked positions and padding rows are dropped before the squares.

    Args:
        values: the value head's output now, shape (rows, width), or jagged; gradients flow through it.
        old_values: the output at the start of the trainer step.
        returns: the targets.
        loss_mask: nonzero where a token counts.
        clip: how far a value may move from the old one; None for no clip.
        loss_agg_mode: see :func:`equipoise.agg_loss`.
        denominators: of the whole optimizer step; None for those of this call, on one rank.
        dp_size: data-parallel ranks whose gradients are averaged.
        loss_scale_factor: constant horizon of "seq-mean-token-sum-norm".
        segment_ids: for rows with several sequences; 0 for none.
        is_padding: shape (rows,); True for rows to exclude whatever their mask.
        prefix: prefix of the metrics' names.

    Returns:
        The share, and ``vf_loss`` (per optimizer step), ``vf_clipfrac`` and ``vpred_mean`` (per token).

    Raises:
        InvalidInput: the clip is below 0, denominators or a horizon is missing, or shapes differ.

    >>> one, mask = torch.ones(1, 1), torch.ones(1, 1)
    >>> value_loss(3 * one, 2 * one, one, mask, clip=0.5)[0].item()
    2.0

    Source: clipping as in PPO's first code; arXiv 2005.12729, section 3.
    """
    if clip is not None and not clip >= 0:
        raise InvalidInput(must("clip", "be at least 0", clip, "use None for no clip"))
    share = Share.of(
        loss_mask,
        loss_agg_mode,
        denominators=denominators,
        dp_size=dp_size,
        loss_scale_factor=loss_scale_factor,
        segment_ids=segment_ids,
        is_padding=is_padding,
    )
    select = share.sequences.select
    now = select(flat(values, loss_mask, "values"))
    before = select(flat(old_values, loss_mask, "old_values").detach())
    target = select(flat(returns, loss_mask, "returns").detach())
    losses = plain = (now - target).square()
    clipped = torch.zeros_like(plain)
    if clip is not None:
        moved = now - before
        # within the clip, take the value itself: the last bit of before + moved could make it count as clipped
        bounded = torch.where(moved.abs() <= clip, now, before + moved.clamp(-clip, clip)) - target
        bounded = bounded.square()
        losses = torch.maximum(plain, bounded)
        clipped = (bounded > plain).to(plain.dtype)
    loss = share.loss(losses / 2)
    chosen = share.sequences.chosen
    return loss, {
        f"{prefix}vf_loss": share.metric(loss),
        f"{prefix}vf_clipfrac": Metric.of(clipped, chosen),
        f"{prefix}vpred_mean": Metric.of(now, chosen),
    }
