"""Advantage estimators by name: from rewards to one advantage per token, on real rows only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from equipoise.errors import InvalidInput, must
from equipoise.registry import Registry
from equipoise.training.loss.sequences import sequences_of


@dataclass(frozen=True, kw_only=True, eq=False)
class AdvantageInputs:
    """The rows of a whole trainer step.

    Args:
        rewards: per row, shape (rows,), or per token, shape (rows, width); only those under the mask count.
        loss_mask: nonzero at the response tokens that the policy sampled, shape (rows, width).
        uids: the prompt of each row, in any order; any hashable. For estimators that compare rollouts of one prompt.
        values: the value head's output at each token, shape (rows, width); for "gae".
        is_padding: shape (rows,); padding rows are excluded from all statistics and have advantages of 0.

    Raises:
        InvalidInput: shapes do not match, or the mask is jagged.
    """

    rewards: torch.Tensor
    loss_mask: torch.Tensor
    uids: Sequence[Hashable] | None = None
    values: torch.Tensor | None = None
    is_padding: Any = None

    def __post_init__(self) -> None:
        mask = self.loss_mask
        if mask.is_nested or mask.dim() != 2:
            raise InvalidInput(must("loss_mask", "be dense of shape (rows, width)", mask.layout, "pad it first"))
        if self.rewards.shape not in (mask.shape, mask.shape[:1]):
            rule = f"have shape {tuple(mask.shape[:1])} or {tuple(mask.shape)}"
            raise InvalidInput(must("rewards", rule, tuple(self.rewards.shape), "pass one per row or per token"))
        if self.values is not None and self.values.shape != mask.shape:
            rule = f"have the mask's shape {tuple(mask.shape)}"
            raise InvalidInput(must("values", rule, tuple(self.values.shape), "pass one per token"))
        if self.uids is not None and len(self.uids) != mask.shape[0]:
            raise InvalidInput(must("uids", f"be {mask.shape[0]}, one per row", len(self.uids), "pass them all"))

    @property
    def real(self) -> torch.Tensor:
        """True for rows other than padding, shape (rows,)."""
        if self.is_padding is None:
            return torch.ones(self.loss_mask.shape[0], dtype=torch.bool, device=self.loss_mask.device)
        return ~torch.as_tensor(self.is_padding, device=self.loss_mask.device).bool()


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Settings of the estimators, each of which documents what it reads.

    Args:
        gamma: discount per token, from 0 to 1.
        lam: λ of GAE, from 0 to 1.
        whiten: normalize GAE's advantages to mean 0 and variance 1 over all tokens of the step.
        norm_by_std: GRPO divides by the standard deviation of the group; False for Dr.GRPO (arXiv 2503.20783).
        epsilon: added to that standard deviation.

    Raises:
        InvalidInput: a value breaks its rule.
    """

    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    norm_by_std: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for field in ("gamma", "lam"):
            value = getattr(self, field)
            if not 0 <= value <= 1:
                raise InvalidInput(must(field, "be from 0 to 1", value, "use 1 for no discount"))
        if not self.epsilon >= 0:
            raise InvalidInput(must("epsilon", "be at least 0", self.epsilon, "use 1e-6"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Advantages:
    """What an estimator returns: both of shape (rows, width), 0 at masked positions, without gradient."""

    advantages: torch.Tensor
    returns: torch.Tensor


AdvantageEstimator = Callable[[AdvantageInputs, AdvantageConfig], Advantages]
advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator")
"""The advantage estimators by name."""


def compute_advantages(name: str, inputs: AdvantageInputs, config: AdvantageConfig | None = None) -> Advantages:
    """Advantages and returns of each token by ``advantage_estimators[name]``.

    Args:
        name: "gae", "grpo", "rloo" or a registered one.
        inputs: the rows of the whole step, before they are split over ranks.
        config: settings; the defaults if None.

    Raises:
        UnknownName: there is no such estimator.
        InvalidInput: the values or uids that the estimator needs are missing.

    >>> found = compute_advantages("rloo", AdvantageInputs(
    ...     rewards=torch.tensor([1.0, 0.0, 7.0]), loss_mask=torch.tensor([[1, 1], [1, 0], [1, 1]]),
    ...     uids=["a", "a", "pad"], is_padding=[False, False, True]))
    >>> found.advantages
    tensor([[ 1.,  1.],
            [-1.,  0.],
            [ 0.,  0.]])
    """
    estimator = advantage_estimators[name]
    with torch.no_grad():
        return estimator(inputs, AdvantageConfig() if config is None else config)


@advantage_estimators.decorator("gae")
def gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Generalized advantage estimation over the tokens under the mask.

    Where ``t+1`` is the next token under the mask, and values after the last token are 0::

        δ_t = r_t + gamma · V_{t+1} - V_t;   A_t = δ_t + gamma · lam · A_{t+1};   R_t = A_t + V_t

    then, with ``whiten``, ``A ← (A - mean) / sqrt(var + 1e-8)`` over all real tokens (var with n - 1). Tokens that
    the policy did not sample (a tool's answer) are skipped. A row's reward belongs to its last token. Reads ``gamma``,
    ``lam``, ``whiten``.

    Source: arXiv 1506.02438, eq. 16.
    """
    if inputs.values is None:
        raise InvalidInput(must("values", "be given with 'gae'", None, "run the value head or use 'grpo'"))
    sequences = sequences_of(inputs.loss_mask, is_padding=inputs.is_padding)
    chosen = sequences.chosen
    values = sequences.select(inputs.values)
    rewards = sequences.select(_token_rewards(inputs, chosen).to(values.dtype))
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + config.gamma * next_value - values[:, t]
        here = delta + config.gamma * config.lam * next_advantage
        next_value = torch.where(chosen[:, t], values[:, t], next_value)
        next_advantage = torch.where(chosen[:, t], here, next_advantage)
        advantages[:, t] = next_advantage
    advantages = sequences.select(advantages)
    returns = sequences.select(advantages + values)
    if config.whiten:
        advantages = sequences.select(_whitened(advantages, chosen))
    return Advantages(advantages=advantages, returns=returns)


@advantage_estimators.decorator("grpo")
def grpo_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """GRPO: the reward relative to the prompt's other rollouts, the same at each token of the row.

    ::

        A = (R - mean of the group) / (std of the group + epsilon)       std with n - 1; left out without norm_by_std

    A prompt with a single rollout uses mean 0 and std 1, as in verl. Reads
    ``norm_by_std``, ``epsilon``.

    Source: arXiv 2402.03300, section 4.1.2; without the std arXiv 2503.20783, section 3.
    """
    scores, group, sizes = _scores(inputs, "grpo")
    alone = sizes == 1
    mean = _per_group(scores, group, sizes) / sizes
    mean = torch.where(alone, 0, mean)
    centred = scores - mean[group]
    if config.norm_by_std:
        variance = _per_group(centred.square(), group, sizes) / (sizes - 1).clamp(min=1)
        std = torch.where(alone, 1, variance.sqrt())
        centred = centred / (std[group] + config.epsilon)
    return _at_each_token(inputs, centred)


@advantage_estimators.decorator("rloo")
def rloo_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """RLOO: the reward minus the mean reward of the *other* rollouts of the prompt.

    ::

        A_i = R_i - Σ_{j ≠ i} R_j / (n - 1)

    A prompt with a single rollout keeps its reward, as in verl. Reads no setting.

    Source: arXiv 2402.14740, REINFORCE leave-one-out.
    """
    del config
    scores, group, sizes = _scores(inputs, "rloo")
    others = _per_group(scores, group, sizes)[group] - scores
    return _at_each_token(inputs, scores - others / (sizes[group] - 1).clamp(min=1))


def _scores(inputs: AdvantageInputs, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reward and group index of each real row, and the size of each group."""
    if inputs.uids is None:
        raise InvalidInput(must("uids", f"be given with {name!r}", None, "pass the prompt of each row"))
    rewards = inputs.rewards
    if rewards.dim() == 2:
        rewards = sequences_of(inputs.loss_mask).select(rewards).sum(-1)
    rows = torch.nonzero(inputs.real).flatten()
    numbers: dict[Hashable, int] = {}
    group = [numbers.setdefault(inputs.uids[row], len(numbers)) for row in cast("list[int]", rows.tolist())]
    index = torch.tensor(group, dtype=torch.long, device=rewards.device)
    return rewards[rows].detach(), index, torch.bincount(index, minlength=len(numbers))


def _per_group(values: torch.Tensor, group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(sizes.numel()).index_add(0, group, values)


def _at_each_token(inputs: AdvantageInputs, scores: torch.Tensor) -> Advantages:
    """Scores of the real rows at each of their tokens; returns are the same without a value head."""
    per_row = scores.new_zeros(inputs.loss_mask.shape[0])
    per_row[inputs.real] = scores
    sequences = sequences_of(inputs.loss_mask, is_padding=inputs.is_padding)
    spread = sequences.select(sequences.spread(per_row))
    return Advantages(advantages=spread, returns=spread)


def _token_rewards(inputs: AdvantageInputs, chosen: torch.Tensor) -> torch.Tensor:
    if inputs.rewards.dim() == 2:
        return inputs.rewards
    positions = torch.arange(1, chosen.shape[1] + 1, device=chosen.device)
    last = (chosen * positions).amax(dim=1, keepdim=True)
    return torch.where(positions == last, inputs.rewards.unsqueeze(-1), 0)


def _whitened(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    count = chosen.sum()
    mean = values.sum() / count.clamp(min=1)
    centred = torch.where(chosen, values - mean, 0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)
