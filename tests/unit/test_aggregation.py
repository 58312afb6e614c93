"""Losses with global denominators."""

from __future__ import annotations

import itertools

import pytest
import torch

import equipoise as eq

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def split(rows: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(sizes))
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def plain(loss: torch.Tensor, mask: torch.Tensor, mode: str, horizon: float) -> float:
    """The definition, row by row."""
    rows = [row[keep.bool()] for row, keep in zip(loss, mask, strict=True)]
    rows = [row for row in rows if row.numel()]
    if mode == "token-mean":
        return float(torch.cat(rows).mean())
    if mode == "token-sum":
        return float(torch.cat(rows).sum())
    sums = [float(row.sum() if mode != "seq-mean-token-mean" else row.mean()) for row in rows]
    return sum(sums) / len(sums) / (horizon if mode.endswith("norm") else 1)


@pytest.mark.parametrize("mode", MODES)
def test_d2_seven_rows_and_one_padding_row_are_the_seven_rows(mode: str) -> None:
    draw = torch.Generator().manual_seed(0)
    loss = torch.randn(8, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(8, 6, generator=draw) < 0.7
    mask[:, 0] = True
    mask[7] = False  # the padding row
    counts = eq.LossDenominators.of(mask, is_padding=[False] * 7 + [True])
    total = eq.agg_loss(
        loss,
        mask,
        mode,
        batch_num_tokens=counts.num_tokens,
        global_batch_size=counts.num_rows,
        loss_scale_factor=6,
    )
    (with_pad,) = torch.autograd.grad(total, loss)
    alone = loss.detach()[:7].clone().requires_grad_()
    want = eq.agg_loss(alone, mask[:7], mode, loss_scale_factor=6)
    (without,) = torch.autograd.grad(want, alone)
    assert abs(float(total.detach()) - float(want.detach())) < 1e-12
    assert abs(float(want.detach()) - plain(alone.detach(), mask[:7], mode, 6)) < 1e-12
    torch.testing.assert_close(with_pad[:7], without, rtol=0, atol=1e-12)
    assert (with_pad[7] == 0).all()


def test_d3_padding_with_a_mask_of_ones_is_out_of_every_denominator() -> None:
    mask = torch.ones(4, 5)
    counts = eq.LossDenominators.of(mask, is_padding=torch.tensor([False, False, False, True]))
    assert (counts.num_tokens, counts.num_rows) == (15, 3)


@pytest.mark.parametrize(("mode", "splits"), list(itertools.product(MODES, [(8,), (4, 4), (1, 2, 5)])))
def test_e7_micro_batches_add_up_to_the_same_loss(mode: str, splits: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    loss = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    mask = torch.rand(8, 6, generator=draw) < 0.6
    mask[:, 2] = True
    whole = eq.agg_loss(loss, mask, mode, loss_scale_factor=6)
    parts = [
        eq.agg_loss(
            loss_part,
            mask_part,
            mode,
            dp_size=2,
            batch_num_tokens=int(mask.sum()),
            global_batch_size=8,
            loss_scale_factor=6,
        )
        for loss_part, mask_part in zip(split(loss, splits), split(mask, splits), strict=True)
    ]
    assert abs(float(sum(parts)) / 2 - float(whole)) < 1e-12


def test_e3_a_global_count_is_asked_for_with_more_than_one_rank() -> None:
    loss, mask = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(eq.InvalidInput, match="batch_num_tokens must be given with dp_size = 4"):
        eq.agg_loss(loss, mask, "token-mean", dp_size=4)
    with pytest.raises(eq.InvalidInput, match="global_batch_size must be given with dp_size = 4"):
        eq.agg_loss(loss, mask, "seq-mean-token-mean", dp_size=4)


def test_e5_the_norm_mode_wants_its_constant() -> None:
    with pytest.raises(eq.InvalidInput, match="loss_scale_factor must be a constant above 0"):
        eq.agg_loss(torch.ones(2, 3), torch.ones(2, 3), "seq-mean-token-sum-norm")


def test_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(eq.InvalidInput, match="did you mean 'token-mean'"):
        eq.agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token_mean")


@pytest.mark.parametrize("mode", MODES)
def test_masked_nan_changes_neither_value_nor_gradient(mode: str) -> None:
    loss = torch.tensor([[1.0, float("nan")], [2.0, float("inf")]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 0]])
    total = eq.agg_loss(loss, mask, mode, loss_scale_factor=2)
    (gradient,) = torch.autograd.grad(total, loss)
    assert torch.isfinite(total)
    assert torch.isfinite(gradient).all()
    assert (gradient[:, 1] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_i1_an_all_zero_mask_gives_zero(mode: str) -> None:
    loss = torch.randn(2, 3, requires_grad=True)
    total = eq.agg_loss(loss, torch.zeros(2, 3), mode, loss_scale_factor=3)
    (gradient,) = torch.autograd.grad(total, loss)
    assert float(total.detach()) == 0
    assert (gradient == 0).all()


def test_e_a_local_mean_would_differ() -> None:
    """What does not hold: averaging micro-batch means is another number (E1: 0.4 for 0.32)."""
    first, second = torch.full((1, 100), 0.5), torch.full((1, 900), 0.3)
    means = [eq.agg_loss(part, torch.ones_like(part), "token-mean") for part in (first, second)]
    local = sum(float(mean) for mean in means) / 2
    right = sum(
        eq.agg_loss(part, torch.ones_like(part), "token-mean", batch_num_tokens=1000) for part in (first, second)
    )
    assert local == pytest.approx(0.4)
    assert float(right) == pytest.approx(0.32)
