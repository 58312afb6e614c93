"""Advantage estimators against plain loops; padding rows are in no statistic."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch

import equipoise as eq
from equipoise.errors import UnknownName

UIDS = ["a", "b", "a", "c", "b", "a", "b"]
SCORES = [1.0, 0.5, 0.0, 2.0, -1.0, 0.25, 3.0]
MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]])


def rows(**changes: Any) -> eq.AdvantageInputs:
    given: dict[str, Any] = {"rewards": torch.tensor(SCORES, dtype=torch.float64), "loss_mask": MASK, "uids": UIDS}
    return eq.AdvantageInputs(**(given | changes))


def plain(name: str, with_std: bool) -> list[float]:
    """One number a row, by loops."""
    found: list[float] = []
    for i, score in enumerate(SCORES):
        group = [SCORES[j] for j in range(len(SCORES)) if UIDS[j] == UIDS[i]]
        others = [SCORES[j] for j in range(len(SCORES)) if UIDS[j] == UIDS[i] and j != i]
        if name == "rloo":
            found.append(score - (statistics.fmean(others) if others else 0.0))
        elif len(group) == 1:
            found.append(score / (1 + 1e-6) if with_std else score)
        else:
            centred = score - statistics.fmean(group)
            found.append(centred / (statistics.stdev(group) + 1e-6) if with_std else centred)
    return found


@pytest.mark.parametrize(("name", "with_std"), [("grpo", True), ("grpo", False), ("rloo", True)])
def test_outcome_advantages_are_those_of_plain_loops(name: str, with_std: bool) -> None:
    found = eq.compute_advantages(name, rows(), eq.AdvantageConfig(norm_by_std=with_std))
    for i, want in enumerate(plain(name, with_std)):
        for t in range(MASK.shape[1]):
            expected = want if MASK[i, t] else 0.0
            assert float(found.advantages[i, t]) == pytest.approx(expected, abs=1e-12)
    assert torch.equal(found.advantages, found.returns)


@pytest.mark.parametrize("uid", ["pad", "a"])
@pytest.mark.parametrize("mask", [0, 1])
def test_a_padding_row_leaves_the_group_mean_at_one_half(uid: str, mask: int) -> None:
    """Rewards [1, 0] and a padding row, with a uid of its own or, by mistake, the group's."""
    given = eq.AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0, float("nan")]),
        loss_mask=torch.tensor([[1, 1], [1, 0], [mask, mask]]),
        uids=["a", "a", uid],
        values=torch.tensor([[0.0, 0.0], [0.0, 0.0], [float("nan"), float("inf")]]),
        is_padding=[False, False, True],
    )
    found = eq.compute_advantages("grpo", given, eq.AdvantageConfig(norm_by_std=False))
    assert found.advantages.tolist() == [[0.5, 0.5], [-0.5, 0.0], [0.0, 0.0]]
    assert eq.compute_advantages("rloo", given).advantages.tolist() == [[1.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]
    whitened = eq.compute_advantages("gae", given).advantages
    assert torch.isfinite(whitened).all()
    assert (whitened[2] == 0).all()


def test_rows_of_a_group_may_lie_anywhere() -> None:
    order = [6, 2, 0, 5, 3, 1, 4]
    found = eq.compute_advantages("grpo", rows()).advantages
    moved = rows(
        rewards=torch.tensor([SCORES[i] for i in order], dtype=torch.float64),
        loss_mask=MASK[order],
        uids=[UIDS[i] for i in order],
    )
    torch.testing.assert_close(eq.compute_advantages("grpo", moved).advantages, found[order], rtol=0, atol=1e-12)


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The sum of discounted errors, term by term."""
    after = [*values, 0.0][1:]
    errors = [r + gamma * v1 - v0 for r, v0, v1 in zip(rewards, values, after, strict=True)]
    return [math.fsum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


@pytest.mark.parametrize("per_token", [False, True])
def test_gae_is_the_discounted_sum_over_the_policys_own_tokens(per_token: bool) -> None:
    draw = random.Random(0)
    values = torch.tensor([[draw.gauss(0, 1) for _ in range(4)] for _ in range(7)], dtype=torch.float64)
    values[MASK == 0] = float("nan")
    rewards = torch.tensor(SCORES, dtype=torch.float64)
    given = torch.full((7, 4), float("inf"), dtype=torch.float64)
    config = eq.AdvantageConfig(gamma=0.9, lam=0.8, whiten=False)
    want = torch.zeros(7, 4, dtype=torch.float64)
    for i in range(7):
        places = [t for t in range(4) if MASK[i, t]]
        own = [0.0] * len(places)
        if places:
            own[-1] = SCORES[i]
        for place, reward in zip(places, own, strict=True):
            given[i, place] = reward
        found = plain_gae(own, [float(values[i, t]) for t in places], 0.9, 0.8)
        for place, advantage in zip(places, found, strict=True):
            want[i, place] = advantage
    found = eq.compute_advantages("gae", rows(rewards=given if per_token else rewards, values=values), config)
    torch.testing.assert_close(found.advantages, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.returns, want + torch.where(MASK != 0, values, 0), rtol=0, atol=1e-12)
    whitened = eq.compute_advantages("gae", rows(values=values), eq.AdvantageConfig(gamma=0.9, lam=0.8))
    tokens = whitened.advantages[MASK != 0]
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-12)
    assert float(tokens.var()) == pytest.approx(1, abs=1e-6)
    assert torch.equal(whitened.returns, found.returns)


@pytest.mark.parametrize("name", list(eq.advantage_estimators))
def test_without_any_token_advantages_are_zero(name: str) -> None:
    given = rows(loss_mask=torch.zeros_like(MASK), values=torch.full(MASK.shape, float("nan")))
    found = eq.compute_advantages(name, given)
    assert (found.advantages == 0).all()
    assert (found.returns == 0).all()


def test_no_gradient_leaves_the_estimators() -> None:
    values = torch.zeros(MASK.shape, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    for name in eq.advantage_estimators:
        assert not eq.compute_advantages(name, rows(rewards=rewards, values=values)).advantages.requires_grad


def test_what_is_missing_or_does_not_fit_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'gae'"):
        eq.compute_advantages("gea", rows())
    with pytest.raises(eq.InvalidInput, match=r"values.*'gae'"):
        eq.compute_advantages("gae", rows())
    with pytest.raises(eq.InvalidInput, match=r"uids.*'grpo'"):
        eq.compute_advantages("grpo", rows(uids=None))
    with pytest.raises(eq.InvalidInput, match=r"uids.*\b7\b.*got 2"):
        rows(uids=["a", "b"])
    with pytest.raises(eq.InvalidInput, match=r"rewards.*\(7,\).*\(7, 4\)"):
        rows(rewards=torch.ones(4))
    with pytest.raises(eq.InvalidInput, match="values"):
        rows(values=torch.ones(7))
    ragged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(eq.InvalidInput, match="loss_mask"):
        eq.AdvantageInputs(rewards=torch.ones(2), loss_mask=ragged)
    with pytest.raises(eq.InvalidInput, match=r"gamma.*\b0\b.*\b1\b"):
        eq.AdvantageConfig(gamma=1.5)
