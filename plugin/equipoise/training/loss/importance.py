"""Importance weights between the engine that sampled the tokens and the engine that trains on them."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from equipoise.errors import InvalidInput, must, nearest
from equipoise.training.loss.sequences import flat, like, sequences_of

_LOG_RATIO_BOUND = 20.0

Level = Literal["token", "sequence"]


def rollout_weights(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    level: Level = "token",
    cap: float = 2.0,
    segment_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Truncated importance weights of rollout tokens.

    ::

        token     w_t = min(exp(old_log_prob - rollout_log_prob), cap)
        sequence  w_t = min(exp(Σ_tokens (old_log_prob - rollout_log_prob)), cap)

    with the logarithm clamped to ±20. No gradient flows through them.

    Args:
        old_log_prob: from the training engine before the update, shape (rows, width), or jagged.
        rollout_log_prob: from the rollout engine, for the same tokens.
        loss_mask: nonzero where a token counts; others are dropped before the exponential.
        level: "token" (biased, low variance) or "sequence".
        cap: largest weight, above 0.
        segment_ids: for rows with several sequences; 0 for none.

    Returns:
        Weights in the layout of ``old_log_prob``; 1 where no token counts.

    Raises:
        InvalidInput: the level is unknown, the cap is not above 0, or shapes differ.

    >>> rollout_weights(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -5.0]]), torch.ones(1, 2))
    tensor([[1., 2.]])

    Source: truncated importance sampling, Ionides 2008; for V-trace arXiv 1802.01561, section 4.1; between rollout and
    training engines Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    if level not in get_args(Level):
        rule = f"be one of {list(get_args(Level))}"
        raise InvalidInput(must("level", rule, level, nearest(str(level), get_args(Level))))
    if not cap > 0:
        raise InvalidInput(must("cap", "be above 0", cap, "use math.inf for no truncation"))
    sequences = sequences_of(loss_mask, segment_ids=segment_ids)
    old = sequences.select(flat(old_log_prob, loss_mask, "old_log_prob").detach())
    log_ratio = old - sequences.select(flat(rollout_log_prob, loss_mask, "rollout_log_prob").detach())
    if level == "sequence":
        log_ratio = sequences.spread(sequences.sum(log_ratio))
    weights = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp().clamp(max=cap)
    weights = sequences.select(weights, 1.0)
    return like(weights, old_log_prob)
