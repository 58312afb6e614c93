"""Estimators of the KL divergence from a reference, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from equipoise._checks import of_kind
from equipoise.errors import InvalidInput, must, nearest

_LOG_RATIO_BOUND = 20.0
_K3_BOUND = 10.0


def _k1(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio


def _k2(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.square() / 2


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    backwards = (-log_ratio).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return (backwards.exp() - backwards - 1).clamp(max=_K3_BOUND)


_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+")


def kl_penalty(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy ‖ reference) at each token from sampled tokens.

    With ``d = log_prob - ref_log_prob``::

        k1  d                       unbiased value
        k2  d² / 2                  biased value; its gradient is that of the KL
        k3  exp(-d) + d - 1         unbiased value, never negative; d is clamped to ±20, the result to at most 10
        k1+, k3+                    the value of k1 or k3 with the gradient of k2 (straight through)

    There is no mask: positions that are masked later must not be NaN here. :func:`equipoise.policy_loss` drops them
    before.

    Args:
        log_prob: log-probs under the policy, in nats, any shape.
        ref_log_prob: under the reference, the same shape.
        kind: one of the above.

    Returns:
        The estimates, the same shape.

    Raises:
        InvalidInput: the kind is unknown, or shapes differ.

    >>> kl_penalty(torch.tensor(-1.0), torch.tensor(-3.0), "k1")
    tensor(2.)

    Source: Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html); k3 in GRPO: arXiv
    2402.03300, eq. 4.
    """
    if kind not in KL_KINDS:
        raise InvalidInput(must("kind", f"be one of {list(KL_KINDS)}", kind, nearest(str(kind), KL_KINDS)))
    for name, column in (("log_prob", log_prob), ("ref_log_prob", ref_log_prob)):
        of_kind(name, column, torch.Tensor, "pass one value per token")
    if log_prob.shape != ref_log_prob.shape:
        rule = f"have the shape of log_prob, {tuple(log_prob.shape)}"
        raise InvalidInput(must("ref_log_prob", rule, tuple(ref_log_prob.shape), "pass one value per token"))
    log_ratio = log_prob - ref_log_prob
    value = _ESTIMATORS[kind.rstrip("+")](log_ratio)
    if not kind.endswith("+"):
        return value
    slope = _k2(log_ratio)
    return value.detach() + (slope - slope.detach())
