"""The policy losses by name: each returns a loss per token, and one function aggregates them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from equipoise.errors import InvalidInput, must
from equipoise.registry import Registry
from equipoise.training.loss.aggregation import MODES
from equipoise.training.loss.inputs import PerToken, PolicyConfig, PolicyInputs, SelectedTokens

_LOG_RATIO_BOUND = 20.0
_LOG_SEQUENCE_RATIO_BOUND = 10.0


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy loss as the registry holds it.

    Args:
        per_token: from tokens, which are finite everywhere, and settings to the loss of each token.
        agg_modes: the modes of :func:`equipoise.agg_loss` that it supports; the first is its default.

    >>> halved = PolicyLoss(per_token=lambda tokens, config: PerToken(
    ...     loss=-tokens.advantages * tokens.log_prob / 2, means={}, largest={}, smallest={}))
    >>> halved.agg_modes[0]
    'token-mean'
    """

    per_token: Callable[[SelectedTokens, PolicyConfig], PerToken]
    agg_modes: tuple[str, ...] = MODES

    def __call__(self, inputs: PolicyInputs, config: PolicyConfig) -> PerToken:
        """Loss of each token of one micro-batch."""
        return self.per_token(inputs.select(), config)


policy_losses: Registry[PolicyLoss] = Registry("policy loss")
"""The policy losses by name."""


def _default_first(mode: str) -> tuple[str, ...]:
    return (mode, *(other for other in MODES if other != mode))


def _ratio(tokens: SelectedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    log_ratio = (tokens.log_prob - tokens.old_log_prob).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return log_ratio, log_ratio.exp()


def _figures(
    tokens: SelectedTokens, loss: torch.Tensor, kl: torch.Tensor, ratio: torch.Tensor, means: dict[str, torch.Tensor]
) -> PerToken:
    means = {"ppo_kl": kl, **means}
    return PerToken(
        loss=tokens.weighted(loss),
        means={name: values.detach() for name, values in means.items()},
        largest={"ratio_max": ratio.detach()},
        smallest={"ratio_min": ratio.detach()},
    )


def clipped(tokens: SelectedTokens, config: PolicyConfig) -> PerToken:
    """PPO's clipped surrogate with decoupled bounds and dual clip.

    With ``r = exp(log_prob - old_log_prob)`` (the difference clamped to ±20) and the token's advantage ``A``::

        l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));  where A < 0:  l = min(l, -A dual_clip)

    times the rollout's importance weight, if any. Masked tokens are dropped before the ratio is computed.

    Logs ``pg_clipfrac`` (clipping raises the loss), ``pg_clipfrac_lower`` (the dual clip lowers it), ``ppo_kl``
    (mean of ``old_log_prob - log_prob``), ``ratio_max``, ``ratio_min``.

    Source: arXiv 1707.06347, eq. 7; dual clip: arXiv 1912.09729; decoupled bounds: arXiv 2503.14476, eq. 10.
    """
    log_ratio, ratio = _ratio(tokens)
    plain = -tokens.advantages * ratio
    bounded = -tokens.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(plain, bounded)
    cut = torch.zeros_like(loss)
    if config.dual_clip is not None:
        ceiling = -tokens.advantages * config.dual_clip
        negative = tokens.advantages < 0
        cut = (negative & (loss > ceiling)).to(loss.dtype)
        loss = torch.where(negative, torch.minimum(loss, ceiling), loss)
    means = {"pg_clipfrac": (bounded > plain).to(loss.dtype), "pg_clipfrac_lower": cut}
    return _figures(tokens, loss, -log_ratio, ratio, means)


def grpo(tokens: SelectedTokens, config: PolicyConfig) -> PerToken:
    """GRPO: the clipped surrogate with a KL term in the loss.

    ::

        l = clipped surrogate + kl_coef · KL(policy ‖ reference)

    The KL term is the one that ``kl_coef`` adds to every policy loss; here it is required. For GRPO without it, use
    "ppo". By default, the loss is averaged over each sequence's tokens, then over sequences.

    Raises:
        InvalidInput: ``kl_coef`` is 0.

    Source: arXiv 2402.03300, eq. 3 and 4. Masks: as :func:`clipped`.
    """
    if config.kl_coef == 0:
        raise InvalidInput(must("kl_coef", "be above 0 with 'grpo'", 0.0, "use 'ppo' for the loss without a KL term"))
    return clipped(tokens, config)


def dr_grpo(tokens: SelectedTokens, config: PolicyConfig) -> PerToken:
    """Dr.GRPO: the clipped surrogate, summed over each sequence and divided by a constant horizon.

    ::

        L = 1 / (sequences · horizon) · Σ_sequences Σ_tokens clipped surrogate

    so that a division by length does not favor long wrong answers. It only supports "seq-mean-token-sum-norm". Its
    advantages are those of "grpo" without the division by the standard deviation.

    Source: arXiv 2503.20783, section 3. Masks: as :func:`clipped`; the horizon does not depend on them.
    """
    return clipped(tokens, config)


def gspo(tokens: SelectedTokens, config: PolicyConfig) -> PerToken:
    """GSPO: one ratio per sequence, the geometric mean of its tokens' ratios, in token form (GSPO-token).

    With ``log s = mean over the sequence's tokens of (log_prob - old_log_prob)`` and ``sg`` for stop-gradient::

        s_t = exp(sg(log s) + log_prob - sg(log_prob));  l_t = max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high))

    with the logarithm clamped to at most 10. ``dual_clip`` is not read. A row must hold whole sequences;
    the mean covers only tokens under the mask. The paper's clip bounds are about 3e-4 (low) and 4e-4 (high).

    Source: arXiv 2507.18071, eq. 7 and 14.
    """
    log_ratio = tokens.log_prob - tokens.old_log_prob
    sequences = tokens.sequences
    mean = sequences.sum(log_ratio.detach()) / sequences.num_tokens().clamp(min=1)
    log_s = sequences.spread(mean) + (tokens.log_prob - tokens.log_prob.detach())
    ratio = sequences.select(log_s).clamp(max=_LOG_SEQUENCE_RATIO_BOUND).exp()
    plain = -tokens.advantages * ratio
    bounded = -tokens.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    means = {"pg_clipfrac": (bounded > plain).to(plain.dtype)}
    return _figures(tokens, torch.maximum(plain, bounded), -log_ratio, ratio, means)


def cispo(tokens: SelectedTokens, config: PolicyConfig) -> PerToken:
    """CISPO: clips the importance weight, so that no token loses its gradient.

    ::

        l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) · A · log_prob

    ``dual_clip`` is not read. The paper has no lower clip: ``clip_low=1``.

    Source: arXiv 2506.13585, eq. 4 and 5. Masks: as :func:`clipped`.
    """
    log_ratio, ratio = _ratio(tokens)
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high).detach()
    means = {"pg_clipfrac": (weight != ratio).to(ratio.dtype)}
    return _figures(tokens, -weight * tokens.advantages * tokens.log_prob, -log_ratio, ratio, means)


policy_losses.register("ppo", PolicyLoss(per_token=clipped))
policy_losses.register("grpo", PolicyLoss(per_token=grpo, agg_modes=_default_first("seq-mean-token-mean")))
policy_losses.register("dr_grpo", PolicyLoss(per_token=dr_grpo, agg_modes=("seq-mean-token-sum-norm",)))
policy_losses.register("gspo", PolicyLoss(per_token=gspo, agg_modes=_default_first("seq-mean-token-mean")))
policy_losses.register("cispo", PolicyLoss(per_token=cispo))
