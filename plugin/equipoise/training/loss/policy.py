"""``policy_loss``: a micro-batch's share of the whole loss, and its metrics."""

from __future__ import annotations

import torch

from equipoise.errors import InvalidInput, must
from equipoise.training.loss.denominators import LossDenominators
from equipoise.training.loss.inputs import PolicyConfig, PolicyInputs
from equipoise.training.loss.kl import kl_penalty
from equipoise.training.loss.metrics import AnyMetric, Metric
from equipoise.training.loss.sequences import Sequences
from equipoise.training.loss.share import Share
from equipoise.training.loss.surrogates import policy_losses


def policy_loss(
    name: str,
    inputs: PolicyInputs,
    config: PolicyConfig | None = None,
    *,
    loss_agg_mode: str | None = None,
    denominators: LossDenominators | None = None,
    dp_size: int = 1,
    loss_scale_factor: float | None = None,
    prefix: str = "actor/",
) -> tuple[torch.Tensor, dict[str, AnyMetric]]:
    """One micro-batch's share of an optimizer step's policy loss, with KL term and entropy bonus.

    ::

        L = agg(l) + kl_coef · agg(KL) - entropy_coef · agg(entropy)

    where ``l`` is the loss of each token by ``policy_losses[name]`` and ``agg`` is :func:`equipoise.agg_loss`. Shares
    add up over micro-batches, and their mean over ranks is the loss. Metrics merge to the same numbers for any ranks
    and micro-batches: ``loss``, ``pg_loss``, ``kl_loss`` and ``entropy_loss`` per optimizer step, the others per token.

    Masked positions and padding rows are dropped before anything is computed from them. A micro-batch without a token
    under the mask returns 0, attached to the graph, with a gradient of exactly 0, and metrics that count nothing.

    Args:
        name: one of ``equipoise.policy_losses``.
        inputs: the tokens of the micro-batch.
        config: settings; the defaults if None.
        loss_agg_mode: see :func:`equipoise.agg_loss`; None for the loss's own default.
        denominators: of the whole optimizer step, over all ranks; None for those of this call, on one rank. They also
            count rows without a token (:class:`LossDenominators`), which ``agg_loss`` by itself does not.
        dp_size: data-parallel ranks whose gradients are averaged.
        loss_scale_factor: constant horizon of "seq-mean-token-sum-norm".
        prefix: prefix of the metrics' names.

    Returns:
        The share, a scalar, and the metrics.

    Raises:
        UnknownName: there is no such loss.
        InvalidInput: the loss does not support the mode, or denominators, a horizon or a column is missing.

    >>> x = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> inputs = PolicyInputs(log_prob=x, old_log_prob=x.detach(), advantages=torch.ones(1, 2),
    ...                       loss_mask=torch.tensor([[1, 0]]))
    >>> loss, metrics = policy_loss("ppo", inputs)
    >>> loss.item(), metrics["actor/pg_clipfrac"].value
    (-1.0, 0.0)
    """
    entry = policy_losses[name]
    config = PolicyConfig() if config is None else config
    mode = entry.agg_modes[0] if loss_agg_mode is None else loss_agg_mode
    if mode not in entry.agg_modes:
        rule = f"be one of {list(entry.agg_modes)} with {name!r}"
        raise InvalidInput(must("loss_agg_mode", rule, mode, "leave it to the loss or choose another loss"))
    share = Share.of(
        inputs.loss_mask,
        mode,
        denominators=denominators,
        dp_size=dp_size,
        loss_scale_factor=loss_scale_factor,
        segment_ids=inputs.segment_ids,
        is_padding=inputs.is_padding,
    )
    tokens = inputs.select(share.sequences)
    found = entry.per_token(tokens, config)
    loss = share.loss(found.loss)
    metrics: dict[str, AnyMetric] = {"pg_loss": share.metric(loss)}
    if config.kl_coef > 0:
        if tokens.ref_log_prob is None:
            raise InvalidInput(must("ref_log_prob", "be given with kl_coef above 0", None, "run the reference"))
        kl = share.loss(kl_penalty(tokens.log_prob, tokens.ref_log_prob, config.kl_kind))
        metrics["kl_loss"] = share.metric(kl)
        loss = loss + config.kl_coef * kl
    if config.entropy_coef != 0:
        if tokens.entropy is None:
            raise InvalidInput(must("entropy", "be given with an entropy_coef", None, "have the engine compute it"))
        loss = loss - config.entropy_coef * share.loss(tokens.entropy)
    if tokens.entropy is not None:
        metrics["entropy_loss"] = share.metric(share.loss(tokens.entropy.detach()))
    metrics["loss"] = share.metric(loss)
    for key, values in found.means.items():
        metrics[key] = Metric.of(values, tokens.sequences.chosen)
    for key, values in found.largest.items():
        metrics[key] = Metric.max(_largest(values, tokens.sequences))
    for key, values in found.smallest.items():
        metrics[key] = Metric.min(-_largest(-values, tokens.sequences))
    return loss, {f"{prefix}{key}": metric for key, metric in metrics.items()}


def _largest(values: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    nothing = values.new_full((1,), float("-inf"))
    return torch.cat([sequences.select(values, float("-inf")).flatten(), nothing]).amax()
