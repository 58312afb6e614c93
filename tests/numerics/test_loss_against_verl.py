"""The same numbers and gradients as verl 0.9.1 where it has the same loss: random data in float64."""

# verl is typed in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.training.loss import aggregation

ROWS, WIDTH = 12, 9
HORIZON = 16.0
EXACT = 1e-12
NAMES = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")
NEAR = 1e-8  # verl adds 1e-8 to the counts that it divides by


@functools.cache
def core_algos() -> Any:
    from verl.trainer.ppo import core_algos as module

    return module


@dataclasses.dataclass(frozen=True)
class Draw:
    """Tokens far enough off policy that every clip is met."""

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    ref_log_prob: torch.Tensor
    rollout_log_prob: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor


def draw(seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    old = normal() - 3
    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.8).long()
    mask[3] = 0
    return Draw(
        log_prob=(old + normal(0.8)).requires_grad_(),
        old_log_prob=old,
        ref_log_prob=old + normal(),
        rollout_log_prob=old + normal(),
        advantages=normal(),
        values=normal(),
        weights=torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) + 0.5,
        mask=mask,
    )


def inputs_of(data: Draw, *, weighted: bool = False) -> eq.PolicyInputs:
    return eq.PolicyInputs(
        log_prob=data.log_prob,
        old_log_prob=data.old_log_prob,
        advantages=data.advantages,
        loss_mask=data.mask,
        ref_log_prob=data.ref_log_prob,
        rollout_weights=data.weights if weighted else None,
    )


def gradient(loss: torch.Tensor, data: Draw) -> torch.Tensor:
    return torch.autograd.grad(loss, data.log_prob)[0]


def actor_config(mode: str, counts: eq.LossDenominators, dp_size: int) -> Any:
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=mode,
        clip_ratio_low=0.15,
        clip_ratio_high=0.3,
        clip_ratio_c=2.5,
    )
    config.global_batch_info.update(
        dp_size=dp_size,
        batch_num_tokens=counts.num_tokens,
        global_batch_size=counts.num_rows,
        loss_scale_factor=HORIZON,
    )
    return config


OURS = eq.PolicyConfig(clip_low=0.15, clip_high=0.3, dual_clip=2.5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", aggregation.MODES)
@pytest.mark.parametrize(("ours", "theirs"), [("ppo", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")])
def test_policy_losses_and_gradients_agree(ours: str, theirs: str, mode: str, weighted: bool) -> None:
    data = draw(0)
    counts = eq.LossDenominators.of(data.mask)
    loss, metrics = eq.policy_loss(
        ours,
        inputs_of(data, weighted=weighted),
        OURS,
        loss_agg_mode=mode,
        denominators=counts,
        dp_size=4,
        loss_scale_factor=HORIZON,
    )
    want, figures = core_algos().get_policy_loss_fn(theirs)(
        old_log_prob=data.old_log_prob,
        log_prob=data.log_prob,
        advantages=data.advantages,
        response_mask=data.mask,
        loss_agg_mode=mode,
        config=actor_config(mode, counts, 4),
        rollout_is_weights=data.weights if weighted else None,
    )
    # verl's per-sequence mean divides by count + 1e-8
    tolerance = NEAR if mode == "seq-mean-token-mean" else EXACT
    assert loss.item() == pytest.approx(want.item(), abs=tolerance, rel=tolerance)
    torch.testing.assert_close(gradient(loss, data), gradient(want, data), rtol=tolerance, atol=tolerance)
    assert metrics["actor/pg_loss"].value == pytest.approx(want.item() / 4, rel=NEAR)
    for name in ("pg_clipfrac", "ppo_kl"):
        assert metrics[f"actor/{name}"].value == pytest.approx(figures[f"actor/{name}"], abs=1e-6), name
        assert metrics[f"actor/{name}"].value != 0
    if ours == "ppo":
        lower = metrics["actor/pg_clipfrac_lower"].value
        assert lower == pytest.approx(figures["actor/pg_clipfrac_lower"], abs=1e-6)
        assert lower > 0


@pytest.mark.parametrize("mode", aggregation.MODES)
@pytest.mark.parametrize("counted", [False, True])
def test_aggregation_agrees(mode: str, counted: bool) -> None:
    data = draw(1)
    given: dict[str, Any] = {"loss_scale_factor": HORIZON}
    if counted:
        given |= {"dp_size": 2, "batch_num_tokens": 301, "global_batch_size": 40}
    ours = eq.agg_loss(data.log_prob, data.mask, mode, **given)
    theirs = core_algos().agg_loss(data.log_prob, data.mask, mode, **given)
    tolerance = NEAR if mode == "seq-mean-token-mean" else EXACT
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=False)
    torch.testing.assert_close(gradient(ours, data), gradient(theirs, data), rtol=tolerance, atol=tolerance)


def test_aggregation_takes_verls_arguments() -> None:
    ours, theirs = (list(inspect.signature(each).parameters.values()) for each in (eq.agg_loss, core_algos().agg_loss))
    same = [(each.name, each.kind, each.default) for each in ours[: len(theirs)]]
    assert same == [(each.name, each.kind, each.default) for each in theirs]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in ours[len(theirs) :])


@pytest.mark.parametrize("mode", aggregation.MODES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@pytest.mark.parametrize("tensors", [False, True])
def test_aggregation_agrees_as_verls_losses_call_it(mode: str, dtype: torch.dtype, tensors: bool) -> None:
    """Masks of any type, counts as tensors, all by position or name; the loss is then changed in place."""
    data = draw(7)
    counts: list[Any] = [2, 301, 40, HORIZON]
    if tensors:
        counts[1:3] = [torch.tensor(301), torch.tensor(40.0)]
    found: list[torch.Tensor] = []
    for agg_loss in (eq.agg_loss, core_algos().agg_loss):
        by_place = agg_loss(data.log_prob, data.mask.to(dtype), mode, *counts)
        by_name = agg_loss(
            loss_mat=data.log_prob,
            loss_mask=data.mask.to(dtype),
            loss_agg_mode=mode,
            **dict(zip(NAMES, counts, strict=True)),
        )
        assert torch.equal(by_place, by_name)
        by_name -= 0.25 * agg_loss(data.log_prob.square(), data.mask.to(dtype), mode, *counts)
        found += [by_name, gradient(by_name, data)]
    tolerance = NEAR if mode == "seq-mean-token-mean" else EXACT
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize("mode", aggregation.MODES)
@pytest.mark.parametrize("under", [float("nan"), float("inf")])
@pytest.mark.parametrize("wider", [0, 5])
def test_neither_what_is_under_the_mask_nor_the_width_reaches_the_loss(mode: str, under: float, wider: int) -> None:
    """Equal to the bit in float64, in value and gradient, where verl gives NaN or another number."""
    data = draw(8)
    counts = (2, 301, 40, HORIZON)
    want = eq.agg_loss(data.log_prob, data.mask, mode, *counts)
    slope = gradient(want, data)
    dirty = torch.where(data.mask.bool(), data.log_prob, under)
    dirty = torch.nn.functional.pad(dirty, (0, wider), value=under)
    found = eq.agg_loss(dirty, torch.nn.functional.pad(data.mask, (0, wider)), mode, *counts)
    torch.testing.assert_close(found, want, rtol=EXACT, atol=EXACT)
    assert torch.equal(gradient(found, data), slope)


def test_without_a_constant_verls_norm_changes_with_the_width_and_ours_is_refused() -> None:
    data = draw(9)
    wide = [torch.nn.functional.pad(each, (0, 5)) for each in (data.log_prob, data.mask)]
    mode = "seq-mean-token-sum-norm"
    assert not torch.isclose(
        core_algos().agg_loss(data.log_prob, data.mask, mode), core_algos().agg_loss(*wide, mode), rtol=0.1
    )
    with pytest.raises(eq.InvalidInput, match=r"loss_scale_factor.*got None"):
        eq.agg_loss(data.log_prob, data.mask, mode)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+"])
def test_kl_estimators_agree(kind: str) -> None:
    data = draw(2)
    ours = eq.kl_penalty(data.log_prob, data.ref_log_prob, kind)
    theirs = core_algos().kl_penalty(data.log_prob, data.ref_log_prob, kind)
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
    slopes = [gradient((data.advantages * kl).sum(), data) for kl in (ours, theirs)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=EXACT, atol=EXACT)


def test_kl_far_from_the_reference_is_bounded_as_verl_bounds_it() -> None:
    far = torch.tensor([-200.0, -30.0, -3.0, 0.0, 3.0, 30.0], dtype=torch.float64)
    zero = torch.zeros_like(far)
    for kind in ("k1", "k2", "k3"):
        torch.testing.assert_close(
            eq.kl_penalty(far, zero, kind), core_algos().kl_penalty(far, zero, kind), rtol=EXACT, atol=EXACT
        )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_value_loss_agrees(mode: str) -> None:
    data = draw(3)
    counts = eq.LossDenominators.of(data.mask)
    loss, metrics = eq.value_loss(
        data.log_prob,
        data.old_log_prob,
        data.values,
        data.mask,
        clip=0.4,
        loss_agg_mode=mode,
        denominators=counts,
        dp_size=2,
        loss_scale_factor=HORIZON,
    )
    want, clipped = core_algos().compute_value_loss(
        vpreds=data.log_prob,
        returns=data.values,
        values=data.old_log_prob,
        response_mask=data.mask,
        cliprange_value=0.4,
        loss_agg_mode=mode,
        dp_size=2,
        batch_num_tokens=counts.num_tokens,
        global_batch_size=counts.num_rows,
        loss_scale_factor=HORIZON,
    )
    assert loss.item() == pytest.approx(want.item(), rel=EXACT)
    torch.testing.assert_close(gradient(loss, data), gradient(want, data), rtol=EXACT, atol=EXACT)
    assert metrics["critic/vf_clipfrac"].value == pytest.approx(float(clipped), abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_weights_agree(level: Any) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    data = draw(4)
    ours = eq.rollout_weights(data.old_log_prob, data.rollout_log_prob, data.mask, level=level, cap=1.5)
    theirs, _ = compute_rollout_correction_weights(
        data.old_log_prob - data.rollout_log_prob, data.mask, rollout_is=level, rollout_is_threshold=1.5
    )
    chosen = data.mask.bool()
    torch.testing.assert_close(ours[chosen], theirs[chosen], rtol=EXACT, atol=EXACT)
    assert (ours[~chosen] == 1).all()


UIDS = ["a", "b", "a", "c", "c", "a", "alone", "b", "b", "c", "a", "b"]


def outcome_rewards(data: Draw) -> torch.Tensor:
    """A reward at the last token of each row."""
    rewards = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row in range(ROWS):
        tokens = data.mask[row].nonzero()
        if tokens.numel():
            rewards[row, int(tokens[-1])] = data.advantages[row, 0]
    return rewards


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("case", ["grpo", "grpo without std", "rloo"])
def test_outcome_advantages_agree(case: str, per_row: bool) -> None:
    data = draw(5)
    data.mask[3, 4] = 1  # every row has a token, so that its reward has a place in verl's layout
    rewards = outcome_rewards(data)
    name, with_std = case.split()[0], "without" not in case
    ours = eq.compute_advantages(
        name,
        eq.AdvantageInputs(rewards=rewards.sum(-1) if per_row else rewards, loss_mask=data.mask, uids=UIDS),
        eq.AdvantageConfig(norm_by_std=with_std),
    )
    estimate: Callable[..., Any] = core_algos().get_adv_estimator_fn(name)
    extra: dict[str, Any] = {"norm_adv_by_std_in_grpo": with_std} if name == "grpo" else {}
    index = np.array(UIDS, dtype=object)
    theirs, returns = estimate(token_level_rewards=rewards, response_mask=data.mask, index=index, **extra)
    alone = torch.tensor([uid == "alone" for uid in UIDS])  # verl divides these by a float32 1 + 1e-6
    for mine, other in ((ours.advantages, theirs), (ours.returns, returns)):
        torch.testing.assert_close(mine[~alone], other[~alone], rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(mine[alone], other[alone], rtol=1e-7, atol=0)


def test_gae_agrees_at_every_token_of_the_response() -> None:
    data = draw(6)
    rewards = outcome_rewards(data)
    ours = eq.compute_advantages(
        "gae",
        eq.AdvantageInputs(rewards=rewards, loss_mask=data.mask, values=data.values),
        eq.AdvantageConfig(gamma=0.97, lam=0.9),
    )
    theirs, returns = core_algos().compute_gae_advantage_return(rewards, data.values, data.mask, 0.97, 0.9)
    chosen = data.mask.bool()
    # verl's n / (n - 1) of the variance is a float32
    torch.testing.assert_close(ours.advantages[chosen], theirs[chosen], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(ours.returns[chosen], returns[chosen], rtol=EXACT, atol=EXACT)
    assert (ours.advantages[~chosen] == 0).all()
    assert (ours.returns[~chosen] == 0).all()
