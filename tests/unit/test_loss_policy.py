"""Policy losses by name: what is refused, what masks do, how to add one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import equipoise as eq
from equipoise.errors import DuplicateName, UnknownName

LOSSES = tuple(eq.policy_losses)
NORM: dict[str, Any] = {"loss_scale_factor": 4.0}
CONFIG = eq.PolicyConfig(kl_coef=0.1, entropy_coef=0.01)


def inputs(log_prob: torch.Tensor, mask: torch.Tensor, **changes: Any) -> eq.PolicyInputs:
    draw = torch.Generator().manual_seed(4)

    def normal() -> torch.Tensor:
        return torch.randn(log_prob.shape, generator=draw, dtype=torch.float64)

    columns: dict[str, Any] = {
        "log_prob": log_prob,
        "old_log_prob": normal() - 1,
        "advantages": normal(),
        "loss_mask": mask,
        "ref_log_prob": normal() - 1,
        "entropy": normal().abs(),
        "rollout_weights": normal().abs(),
    }
    return eq.PolicyInputs(**(columns | changes))


def drawn(rows: int = 3, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    log_prob = (torch.randn(rows, width, generator=draw, dtype=torch.float64) - 1).requires_grad_()
    mask = torch.rand(rows, width, generator=draw) < 0.6
    mask[0, 0], mask[0, 1] = True, False
    return log_prob, mask


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_what_stands_under_the_mask_reaches_neither_value_nor_gradient(name: str, junk: float) -> None:
    """Not through the exponential of the ratio either: 0 · exp(inf) would be NaN."""
    log_prob, mask = drawn()
    clean = inputs(log_prob, mask)
    want, figures = eq.policy_loss(name, clean, CONFIG, **NORM)
    (want_slope,) = torch.autograd.grad(want, log_prob)
    columns = ("old_log_prob", "advantages", "ref_log_prob", "entropy", "rollout_weights")
    dirty = {field: torch.where(mask, getattr(clean, field), junk) for field in columns}
    dirty["log_prob"] = torch.where(mask, log_prob.detach(), junk).requires_grad_()
    found, metrics = eq.policy_loss(name, dataclasses.replace(clean, **dirty), CONFIG, **NORM)
    (slope,) = torch.autograd.grad(found, dirty["log_prob"])
    assert found.item() == want.item()
    assert torch.equal(slope, want_slope)
    assert eq.metric_values(metrics) == eq.metric_values(figures)


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_policy_and_its_entropy_get_a_gradient(name: str) -> None:
    log_prob, mask = drawn()
    clean = inputs(log_prob, mask)
    others = {
        field: getattr(clean, field).requires_grad_()
        for field in ("old_log_prob", "advantages", "ref_log_prob", "rollout_weights", "entropy")
    }
    loss, _ = eq.policy_loss(name, dataclasses.replace(clean, **others), CONFIG, **NORM)
    loss.backward()
    assert log_prob.grad is not None
    assert others["entropy"].grad is not None
    assert [field for field, column in others.items() if column.grad is not None] == ["entropy"]


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    log_prob, mask = drawn()
    half = inputs(log_prob, mask)
    columns = ("old_log_prob", "advantages", "ref_log_prob", "entropy", "rollout_weights")
    given = {field: getattr(half, field).bfloat16() for field in columns} | {"log_prob": log_prob.bfloat16()}
    loss, _ = eq.policy_loss(name, dataclasses.replace(half, **given), CONFIG, **NORM)
    assert loss.dtype == torch.float32


def test_each_loss_has_its_own_way_to_aggregate() -> None:
    log_prob, mask = drawn()
    for name, mode in {
        "ppo": "token-mean",
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "gspo": "seq-mean-token-mean",
        "cispo": "token-mean",
    }.items():
        default, _ = eq.policy_loss(name, inputs(log_prob, mask), CONFIG, **NORM)
        named, _ = eq.policy_loss(name, inputs(log_prob, mask), CONFIG, loss_agg_mode=mode, **NORM)
        assert torch.equal(default, named)


def test_dr_grpo_does_not_divide_by_the_length_of_an_answer() -> None:
    """A loss of 1 a token: 4 tokens weigh four times as much as 1, over 2 rows and a horizon of 8."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    same = torch.zeros(2, 4, dtype=torch.float64)
    one = eq.PolicyInputs(log_prob=same, old_log_prob=same, advantages=-torch.ones(2, 4), loss_mask=mask)
    loss, _ = eq.policy_loss("dr_grpo", one, loss_scale_factor=8)
    assert float(loss) == 5 / 2 / 8
    with pytest.raises(eq.InvalidInput, match=r"loss_agg_mode.*\['seq-mean-token-sum-norm'\].*'dr_grpo'"):
        eq.policy_loss("dr_grpo", one, loss_agg_mode="token-mean")
    with pytest.raises(eq.InvalidInput, match=r"loss_scale_factor.*\b0\b"):
        eq.policy_loss("dr_grpo", one)


def test_gspo_takes_one_ratio_for_a_sequence_also_where_rows_hold_several() -> None:
    """Ratios e and e^3 in one sequence: both tokens get e^2; the second sequence of the row has e^-1."""
    config = eq.PolicyConfig(clip_low=1.0, clip_high=math.inf)
    log_prob = torch.tensor([[1.0, 3.0, -1.0]], dtype=torch.float64, requires_grad=True)
    packed = eq.PolicyInputs(
        log_prob=log_prob,
        old_log_prob=torch.zeros(1, 3, dtype=torch.float64),
        advantages=torch.ones(1, 3),
        loss_mask=torch.ones(1, 3),
        segment_ids=torch.tensor([[1, 1, 2]]),
    )
    loss, metrics = eq.policy_loss("gspo", packed, config, loss_agg_mode="token-sum")
    loss.backward()
    assert loss.item() == pytest.approx(-2 * math.e**2 - math.e**-1, rel=1e-12)
    want = torch.tensor([[-(math.e**2), -(math.e**2), -(math.e**-1)]], dtype=torch.float64)
    torch.testing.assert_close(log_prob.grad, want, rtol=1e-12, atol=0)
    assert metrics["actor/ratio_max"].value == pytest.approx(math.e**2)


def test_cispo_keeps_the_gradient_of_clipped_tokens_and_ppo_does_not() -> None:
    slopes: dict[str, float] = {}
    for name in ("ppo", "cispo"):
        log_prob = torch.tensor([[2.0]], requires_grad=True)
        one = torch.ones(1, 1)
        token = eq.PolicyInputs(log_prob=log_prob, old_log_prob=0 * one, advantages=one, loss_mask=one)
        eq.policy_loss(name, token)[0].backward()
        assert log_prob.grad is not None
        slopes[name] = log_prob.grad.item()
    assert slopes == {"ppo": 0.0, "cispo": pytest.approx(-1.2)}


def test_what_a_setting_needs_must_be_there() -> None:
    log_prob, mask = drawn()
    with pytest.raises(UnknownName, match="did you mean 'grpo'"):
        eq.policy_loss("grop", inputs(log_prob, mask))
    with pytest.raises(eq.InvalidInput, match=r"kl_coef.*\b0\b.*'grpo'"):
        eq.policy_loss("grpo", inputs(log_prob, mask))
    with pytest.raises(eq.InvalidInput, match=r"ref_log_prob.*\b0\b"):
        eq.policy_loss("ppo", inputs(log_prob, mask, ref_log_prob=None), CONFIG)
    with pytest.raises(eq.InvalidInput, match="entropy"):
        eq.policy_loss("ppo", inputs(log_prob, mask, entropy=None), CONFIG)
    with pytest.raises(eq.InvalidInput, match="advantages"):
        inputs(log_prob, mask, advantages=torch.ones(3))


def test_more_than_one_rank_wants_global_denominators() -> None:
    log_prob, mask = drawn()
    for mode in ("token-mean", "token-sum", "seq-mean-token-mean"):
        with pytest.raises(eq.InvalidInput, match=r"denominators.*\b2\b"):
            eq.policy_loss("ppo", inputs(log_prob, mask), loss_agg_mode=mode, dp_size=2)
    with pytest.raises(eq.InvalidInput, match=r"denominators.*\b2\b"):
        eq.sft_loss(log_prob, mask, dp_size=2)
    with pytest.raises(eq.InvalidInput, match=r"denominators.*\b2\b"):
        eq.value_loss(log_prob, log_prob, log_prob, mask, dp_size=2)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("clip_low", 1.2, "be from 0 to 1"),
        ("clip_high", -0.1, "be at least 0"),
        ("clip_high", float("nan"), "be at least 0"),
        ("dual_clip", 1.0, "be above 1"),
        ("kl_coef", -1.0, "be at least 0"),
        ("kl_kind", "k4", "be one of"),
    ],
)
def test_settings_name_their_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(eq.InvalidInput, match=f"{field} must {rule}"):
        eq.PolicyConfig(**{field: value})


def test_a_loss_from_outside_is_used_like_the_others() -> None:
    """As CONTRIBUTING tells: REINFORCE in five lines, with everything around it from the room."""

    def reinforce(tokens: eq.SelectedTokens, config: eq.PolicyConfig) -> eq.PerToken:
        del config
        return eq.PerToken(loss=-tokens.advantages * tokens.log_prob, means={}, largest={}, smallest={})

    name = "reinforce of a test"
    eq.policy_losses.register(name, eq.PolicyLoss(per_token=reinforce))
    log_prob, mask = drawn()
    loss, metrics = eq.policy_loss(name, inputs(log_prob, mask))
    want = -(inputs(log_prob, mask).advantages * log_prob)[mask].mean()
    assert loss.item() == pytest.approx(want.item(), abs=1e-12)
    assert set(metrics) == {"actor/loss", "actor/pg_loss", "actor/entropy_loss"}
    with pytest.raises(DuplicateName):
        eq.policy_losses.register("ppo", eq.PolicyLoss(per_token=reinforce))


def test_a_registered_loss_can_be_called_by_itself() -> None:
    log_prob, mask = drawn()
    found = eq.policy_losses["ppo"](inputs(log_prob, mask), eq.PolicyConfig())
    assert found.loss.shape == mask.shape
    assert (found.loss[~mask] == 0).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_weights_of_jagged_rows_are_those_of_padded_ones(level: Any) -> None:
    old, drawn_at = [[0.1, 0.4], [-0.3, 0.2, 0.9]], [[0.0, -0.5], [0.1, 0.1, -2.0]]
    masks = [[1, 1], [1, 0, 1]]

    def jagged(rows: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    def padded(rows: Any) -> torch.Tensor:
        return torch.tensor([[*row, float("nan")][:3] if len(row) < 3 else row for row in rows])

    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    wide = eq.rollout_weights(padded(old), padded(drawn_at), mask, level=level)
    flat = eq.rollout_weights(jagged(old), jagged(drawn_at), jagged(masks), level=level)
    rows = list(flat.unbind())
    assert torch.equal(rows[0], wide[0, :2])
    assert torch.equal(rows[1], wide[1])
    assert float(wide[1, 1]) == 1.0
    assert float(wide.max()) == 2.0


def test_rollout_weights_refuse_what_they_do_not_know() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(eq.InvalidInput, match="did you mean 'token'"):
        eq.rollout_weights(one, one, one, level="tokens")  # pyright: ignore[reportArgumentType]
    with pytest.raises(eq.InvalidInput, match=r"cap.*\b0\b"):
        eq.rollout_weights(one, one, one, cap=0)


def test_a_value_that_fell_past_the_clip_is_bounded_below() -> None:
    now, before, target = torch.tensor([[-3.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]])
    loss, metrics = eq.value_loss(now, before, target, torch.ones(1, 1), clip=0.5)
    assert float(loss) == 8.0  # ((-3 - 1)²) / 2; from the bound -0.5 it would be 1.125
    assert metrics["critic/vf_clipfrac"].value == 0.0
    loss, metrics = eq.value_loss(now, before, torch.tensor([[-4.0]]), torch.ones(1, 1), clip=0.5)
    assert float(loss) == 6.125  # ((-0.5 + 4)²) / 2
    assert metrics["critic/vf_clipfrac"].value == 1.0


def test_the_value_loss_without_a_clip_is_half_the_square() -> None:
    now, target = torch.tensor([[3.0, 9.0]]), torch.tensor([[1.0, float("nan")]])
    loss, metrics = eq.value_loss(now, 0 * now, target, torch.tensor([[1, 0]]), clip=None)
    assert float(loss) == 2.0
    assert metrics["critic/vf_clipfrac"].value == 0
    with pytest.raises(eq.InvalidInput, match=r"clip.*\b0\b"):
        eq.value_loss(now, now, now, torch.ones(1, 2), clip=-1)


def test_an_unknown_kl_estimator_names_the_nearest() -> None:
    with pytest.raises(eq.InvalidInput, match="kind"):
        eq.kl_penalty(torch.ones(1), torch.ones(1), "kl")


@pytest.mark.parametrize("name", ["log_prob", "old_log_prob", "advantages", "loss_mask"])
def test_a_column_that_every_loss_needs_is_asked_for(name: str) -> None:
    columns: dict[str, Any] = dict.fromkeys(("log_prob", "old_log_prob", "advantages", "loss_mask"), torch.ones(1, 2))
    columns[name] = None
    with pytest.raises(eq.InvalidInput, match=rf"{name}"):
        eq.PolicyInputs(**columns)
