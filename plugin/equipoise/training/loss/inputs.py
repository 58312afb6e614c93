"""The inputs and settings of all policy losses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from equipoise.errors import InvalidInput, must, nearest
from equipoise.training.loss.kl import KL_KINDS
from equipoise.training.loss.sequences import Sequences, flat, sequences_of


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Settings of the policy losses, each of which documents what it reads.

    Args:
        clip_low: the lower clip of the ratio is ``1 - clip_low``; 1 for none.
        clip_high: the upper clip of the ratio is ``1 + clip_high``. A value above ``clip_low`` is DAPO's clip-higher
            (arXiv 2503.14476, section 3.1).
        dual_clip: for a negative advantage, a token's loss is at most ``dual_clip · |advantage|`` (dual-clip PPO, arXiv
            1912.09729); above 1, or None for no bound.
        kl_coef: weight of the KL term in the loss; 0 for none.
        kl_kind: its estimator, see :func:`equipoise.kl_penalty`.
        entropy_coef: weight of the entropy bonus; 0 for none.

    Raises:
        InvalidInput: a value breaks its rule.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise InvalidInput(must("clip_low", "be from 0 to 1", self.clip_low, "use 1 for no lower clip"))
        if not self.clip_high >= 0:
            raise InvalidInput(must("clip_high", "be at least 0", self.clip_high, "use math.inf for no upper clip"))
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise InvalidInput(must("dual_clip", "be above 1", self.dual_clip, "use None for no dual clip"))
        if not abs(self.entropy_coef) < float("inf"):
            raise InvalidInput(must("entropy_coef", "be a finite number", self.entropy_coef, "use 0 for no bonus"))
        if not 0 <= self.kl_coef < float("inf"):
            raise InvalidInput(must("kl_coef", "be at least 0", self.kl_coef, "use 0 for no KL term"))
        if self.kl_kind not in KL_KINDS:
            raise InvalidInput(
                must("kl_kind", f"be one of {list(KL_KINDS)}", self.kl_kind, nearest(str(self.kl_kind), KL_KINDS))
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyInputs:
    """One micro-batch, token by token: all columns of shape (rows, width), or all jagged.

    Args:
        log_prob: log-probs of the tokens under the current policy; gradients flow through it.
        old_log_prob: under the policy at the start of the trainer step.
        advantages: advantages of the tokens.
        loss_mask: nonzero where a token counts.
        ref_log_prob: under the reference policy; for the KL term.
        entropy: entropy of the policy at each token; for the bonus. Gradients flow through it.
        rollout_weights: importance weights of the tokens, see :func:`equipoise.rollout_weights`.
        segment_ids: for rows with several sequences; 0 for none.
        is_padding: shape (rows,); True for rows to exclude whatever their mask.

    Raises:
        InvalidInput: a shape differs from the mask's.
    """

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    ref_log_prob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    rollout_weights: torch.Tensor | None = None
    segment_ids: torch.Tensor | None = None
    is_padding: Any = None

    def __post_init__(self) -> None:
        for name in ("log_prob", "old_log_prob", "advantages", "loss_mask"):
            if getattr(self, name) is None:
                raise InvalidInput(must(name, "be given", None, "pass one value per token"))
        for field in fields(self):
            column = getattr(self, field.name)
            if field.name not in ("loss_mask", "segment_ids", "is_padding") and column is not None:
                flat(column, self.loss_mask, field.name)

    def select(self, sequences: Sequences | None = None) -> SelectedTokens:
        """The inputs with neutral values at masked positions, so that nothing there reaches a value or gradient.

        Half precision becomes float32; only ``log_prob`` and ``entropy`` keep their graph.

        Args:
            sequences: those of these inputs, if already known.
        """
        if sequences is None:
            sequences = sequences_of(self.loss_mask, segment_ids=self.segment_ids, is_padding=self.is_padding)
        known = sequences

        def column(name: str, fill: float = 0.0) -> torch.Tensor | None:
            values: torch.Tensor | None = getattr(self, name)
            if values is None:
                return None
            values = flat(values, self.loss_mask, name)
            if values.dtype in (torch.float16, torch.bfloat16):
                values = values.float()
            return known.select(values if name in ("log_prob", "entropy") else values.detach(), fill)

        log_prob, old_log_prob, advantages = column("log_prob"), column("old_log_prob"), column("advantages")
        assert log_prob is not None
        assert old_log_prob is not None
        assert advantages is not None
        return SelectedTokens(
            log_prob=log_prob,
            old_log_prob=old_log_prob,
            advantages=advantages,
            sequences=sequences,
            ref_log_prob=column("ref_log_prob"),
            entropy=column("entropy"),
            rollout_weights=column("rollout_weights", 1.0),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectedTokens:
    """What a policy loss gets: finite tensors of one shape (rows, width), and which tokens count.

    Attributes:
        sequences: which tokens count, and sums over sequences.
        log_prob: as in :class:`PolicyInputs`, like the others; 0 at masked positions.
        old_log_prob: no gradient.
        advantages: no gradient.
        ref_log_prob: no gradient.
        entropy: with its graph.
        rollout_weights: no gradient; 1 at masked positions.
    """

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    sequences: Sequences
    ref_log_prob: torch.Tensor | None
    entropy: torch.Tensor | None
    rollout_weights: torch.Tensor | None

    def weighted(self, losses: torch.Tensor) -> torch.Tensor:
        """``losses`` times the rollout's importance weights, if any."""
        return losses if self.rollout_weights is None else losses * self.rollout_weights


@dataclass(frozen=True, kw_only=True, eq=False)
class PerToken:
    """What a policy loss returns, before any aggregation.

    Attributes:
        loss: loss of each token, shape (rows, width), with its graph.
        means: tensors of that shape to log as a mean over tokens, by name.
        largest: tensors to log as their maximum.
        smallest: tensors to log as their minimum.
    """

    loss: torch.Tensor
    means: dict[str, torch.Tensor]
    largest: dict[str, torch.Tensor]
    smallest: dict[str, torch.Tensor]
