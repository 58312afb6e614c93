"""Losses with global denominators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

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
def test_seven_rows_and_one_padding_row_are_the_seven_rows(mode: str) -> None:
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


def test_padding_with_a_mask_of_ones_is_out_of_every_denominator() -> None:
    mask = torch.ones(4, 5)
    counts = eq.LossDenominators.of(mask, is_padding=torch.tensor([False, False, False, True]))
    assert (counts.num_tokens, counts.num_rows) == (15, 3)


@pytest.mark.parametrize(("mode", "splits"), list(itertools.product(MODES, [(4, 4), (2,) * 4, (1,) * 8, (1, 2, 5)])))
def test_micro_batches_add_up_to_the_same_loss_and_gradient(mode: str, splits: tuple[int, ...]) -> None:
    """One optimizer step made of 2, 4 or 8 accumulated micro-batches, or of unequal ones."""
    draw = torch.Generator().manual_seed(1)
    loss = torch.randn(8, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(8, 6, generator=draw) < 0.6
    mask[:, 2] = True
    whole = eq.agg_loss(loss, mask, mode, loss_scale_factor=6)
    (want,) = torch.autograd.grad(whole, loss)
    accumulated, found = torch.zeros_like(loss), 0.0
    for loss_part, mask_part in zip(split(loss, splits), split(mask, splits), strict=True):
        share = eq.agg_loss(
            loss_part,
            mask_part,
            mode,
            dp_size=2,
            batch_num_tokens=int(mask.sum()),
            global_batch_size=8,
            loss_scale_factor=6,
        )
        accumulated += torch.autograd.grad(share, loss)[0] / 2
        found += share.item() / 2
    assert abs(found - whole.item()) < 1e-12
    torch.testing.assert_close(accumulated, want, rtol=0, atol=1e-12)


def test_a_global_count_is_asked_for_with_more_than_one_rank() -> None:
    loss, mask = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(eq.InvalidInput, match=r"batch_num_tokens.*\b4\b"):
        eq.agg_loss(loss, mask, "token-mean", dp_size=4)
    with pytest.raises(eq.InvalidInput, match=r"global_batch_size.*\b4\b"):
        eq.agg_loss(loss, mask, "seq-mean-token-mean", dp_size=4)


def test_the_norm_mode_wants_its_constant() -> None:
    with pytest.raises(eq.InvalidInput, match=r"loss_scale_factor.*\b0\b"):
        eq.agg_loss(torch.ones(2, 3), torch.ones(2, 3), "seq-mean-token-sum-norm")


@pytest.mark.parametrize("width", [100, 200])
def test_padding_a_batch_wider_changes_nothing(width: int) -> None:
    loss, mask = torch.full((4, width), float("nan")), torch.zeros(4, width)
    loss[:, :60], mask[:, :60] = 2.0, 1
    total = eq.agg_loss(loss, mask, "seq-mean-token-sum-norm", loss_scale_factor=80)
    assert float(total) == pytest.approx(60 * 2 / 80)


def test_micro_batches_of_100_and_900_tokens() -> None:
    parts = [torch.full((1, 100), 0.5, dtype=torch.float64), torch.full((1, 900), 0.3, dtype=torch.float64)]
    shares = [eq.agg_loss(part, torch.ones_like(part), "token-mean", batch_num_tokens=1000) for part in parts]
    assert float(sum(shares)) == pytest.approx(0.32, abs=1e-12)


def test_two_ranks_of_100_and_900_tokens_and_the_gradient_average() -> None:
    """The loss is the parameter times 0.5 or 0.3, so that loss and gradient are both 0.32."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    losses: list[torch.Tensor] = []
    for tokens, mean in ((100, 0.5), (900, 0.3)):
        part = torch.full((1, tokens), mean, dtype=torch.float64) * scale
        losses.append(eq.agg_loss(part, torch.ones(1, tokens), "token-mean", dp_size=2, batch_num_tokens=1000))
    (gradient,) = torch.autograd.grad(sum(losses, torch.zeros(())) / 2, scale)
    assert sum(loss.item() for loss in losses) / 2 == pytest.approx(0.32, abs=1e-12)
    assert float(gradient) == pytest.approx(0.32, abs=1e-12)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_unit_losses_of_32_rows_on_4_ranks(mode: str) -> None:
    ranks = [torch.ones(8, 1) for _ in range(4)]
    shares = [eq.agg_loss(rank, torch.ones(8, 1), mode, dp_size=4, global_batch_size=32) for rank in ranks]
    assert float(sum(shares)) / 4 == 1.0


def test_two_groups_of_10_and_90_tokens() -> None:
    loss, mask = torch.zeros(2, 90), torch.ones(2, 90)
    loss[0, :10], mask[0, 10:] = 1.0, 0
    groups = torch.tensor([0, 1])
    assert float(eq.agg_loss(loss, mask, "token-mean")) == pytest.approx(0.1)
    assert float(eq.group_mean(loss, mask, groups)) == 0.5
    assert float(eq.group_mean(loss[:1], mask[:1], groups[:1])) == 1.0


def test_a_group_spread_over_ranks_and_micro_batches_weighs_the_same() -> None:
    draw = torch.Generator().manual_seed(2)
    loss = torch.randn(9, 5, generator=draw, dtype=torch.float64)
    mask = torch.rand(9, 5, generator=draw) < 0.7
    mask[4] = False
    groups = torch.tensor([0, 1, 2, 0, 3, 1, 2, 2, 0])  # group 3 has no token
    is_padding = [False] * 8 + [True]
    real = mask & ~torch.tensor(is_padding).unsqueeze(-1)
    means = [float(loss[groups == g][real[groups == g]].mean()) for g in (0, 1, 2)]
    whole = eq.group_mean(loss, mask, groups, is_padding=is_padding)
    assert float(whole) == pytest.approx(sum(means) / 3, abs=1e-12)
    counts = torch.stack([real[groups == g].sum() for g in range(4)])
    shares = [
        eq.group_mean(loss[a:b], mask[a:b], groups[a:b], dp_size=2, group_num_tokens=counts, is_padding=is_padding[a:b])
        for a, b in ((0, 2), (2, 3), (3, 7), (7, 9))
    ]
    assert float(sum(shares)) / 2 == pytest.approx(float(whole), abs=1e-12)
    with pytest.raises(eq.InvalidInput, match=r"group_num_tokens.*\b2\b"):
        eq.group_mean(loss, mask, groups, dp_size=2)
    with pytest.raises(eq.InvalidInput, match="group_ids"):
        eq.group_mean(loss, mask, groups[:3])


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
def test_an_all_zero_mask_gives_zero(mode: str) -> None:
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


def test_a_local_mean_has_its_own_name() -> None:
    loss = torch.tensor([[1.0, float("nan")], [4.0, 7.0]], requires_grad=True)
    mean = eq.local_mean(loss, torch.tensor([[1, 0], [1, 1]]))
    (gradient,) = torch.autograd.grad(mean, loss)
    assert mean.item() == 4.0
    torch.testing.assert_close(gradient, torch.tensor([[1 / 3, 0], [1 / 3, 1 / 3]]))
    assert eq.local_mean(loss, torch.zeros(2, 2)).item() == 0


ROWS = ([1.0, 2.0], [5.0], [3.0, 4.0, 8.0, 1.0], [2.0, 2.0, 7.0])
MASKS = ([1, 1], [1], [0, 1, 1, 0], [0, 0, 0])


def jagged(rows: Any) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def in_rows(values: Any, *, fill: float = 0) -> torch.Tensor:
    """The four sequences in two rows with gaps: the first and third, the second and fourth."""
    return torch.tensor([[*values[0], fill, *values[2]], [*values[1], *values[3], fill, fill, fill]])


SEGMENTS = torch.tensor([[1, 1, 0, 4, 4, 4, 4], [1, 7, 7, 7, 0, 0, 0]])


@pytest.mark.parametrize("mode", MODES)
def test_packed_and_jagged_rows_are_reduced_by_sequence(mode: str) -> None:
    """Several sequences in a row, gaps between them, one sequence all masked, one id used in two rows."""
    wide = torch.full((4, 4), float("nan"), dtype=torch.float64)
    mask = torch.zeros(4, 4)
    for i, (row, keep) in enumerate(zip(ROWS, MASKS, strict=True)):
        wide[i, : len(row)], mask[i, : len(row)] = torch.tensor(row, dtype=torch.float64), torch.tensor(keep).float()
    want = eq.agg_loss(wide, mask, mode, loss_scale_factor=5)
    packed_mask = in_rows(MASKS)
    packed = in_rows(ROWS, fill=float("nan")).double().requires_grad_()
    found = eq.agg_loss(packed, packed_mask, mode, loss_scale_factor=5, segment_ids=SEGMENTS)
    (gradient,) = torch.autograd.grad(found, packed)
    assert found.item() == pytest.approx(float(want), abs=1e-12)
    assert (gradient[packed_mask == 0] == 0).all()
    assert (gradient[packed_mask != 0] != 0).all()
    flat = eq.agg_loss(jagged(ROWS), jagged(MASKS), mode, loss_scale_factor=5)
    assert float(flat) == pytest.approx(float(want), rel=1e-6)
    if mode.startswith("seq"):
        as_rows = eq.agg_loss(packed.detach(), packed_mask, mode, loss_scale_factor=5)
        assert abs(float(as_rows) - float(want)) > 1e-3, "sequences are not rows"


def test_packed_sequences_are_counted_one_by_one() -> None:
    counts = eq.LossDenominators.of(in_rows(MASKS), segment_ids=SEGMENTS)
    assert (counts.num_tokens, counts.num_rows) == (5, 4)  # the sequence without a token is a real one all the same
    assert eq.LossDenominators.of(jagged(MASKS)) == counts
    last_out = eq.LossDenominators.of(in_rows(MASKS), segment_ids=SEGMENTS, is_padding=[False, True])
    assert (last_out.num_tokens, last_out.num_rows) == (4, 2)


def test_tokens_in_no_segment_do_not_count() -> None:
    mask = torch.ones(1, 4)
    segments = torch.tensor([[1, 1, 0, 0]])
    assert float(eq.agg_loss(torch.arange(4.0).unsqueeze(0), mask, "token-sum", segment_ids=segments)) == 1.0
    assert eq.LossDenominators.of(mask, segment_ids=segments).num_tokens == 2


def test_what_does_not_fit_is_refused_by_name() -> None:
    loss, mask = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(eq.InvalidInput, match=r"loss_mat.*\(2, 3\).*got \(3"):
        eq.agg_loss(torch.ones(3), mask, "token-mean")
    with pytest.raises(eq.InvalidInput, match="segment_ids"):
        eq.agg_loss(loss, mask, "token-mean", segment_ids=torch.ones(2, 3))
    with pytest.raises(eq.InvalidInput, match="is_padding"):
        eq.agg_loss(loss, mask, "token-mean", is_padding=[True])
    with pytest.raises(eq.InvalidInput, match=r"loss_mat.*got 'padded'"):
        eq.agg_loss(loss, jagged(MASKS), "token-mean")
    with pytest.raises(eq.InvalidInput, match=r"loss_mat.*got \[1.*\b2\b.*\b4\b.*\b3\b"):
        eq.agg_loss(jagged([ROWS[i] for i in (1, 0, 2, 3)]), jagged(MASKS), "token-mean")
    with pytest.raises(eq.InvalidInput, match="segment_ids"):
        eq.agg_loss(jagged(ROWS), jagged(MASKS), "token-mean", segment_ids=SEGMENTS)


@pytest.mark.parametrize("form", ["dense", "jagged"])
def test_a_padding_row_with_a_mask_of_ones_is_out_of_the_sum_too(form: str) -> None:
    rows = [[1.0, 2.0], [3.0, float("nan")]]
    loss, mask = torch.tensor(rows), torch.ones(2, 2)
    if form == "jagged":
        loss, mask = jagged(rows), jagged([[1, 1], [1, 1]])
    for mode in MODES:
        found = eq.agg_loss(loss, mask, mode, loss_scale_factor=1, is_padding=[False, True])
        assert float(found) == (1.5 if mode in ("token-mean", "seq-mean-token-mean") else 3.0)


def test_a_row_of_zeros_among_others_adds_nothing() -> None:
    loss = torch.tensor([[1.0, 3.0], [float("nan"), float("inf")]], requires_grad=True)
    for mode in MODES:
        total = eq.agg_loss(loss, torch.tensor([[1, 1], [0, 0]]), mode, loss_scale_factor=1, global_batch_size=2)
        (gradient,) = torch.autograd.grad(total, loss)
        assert torch.isfinite(total)
        assert (gradient[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32_padded_or_jagged(dtype: torch.dtype) -> None:
    """700 tokens of 100 overflow float16, and a sum of ones in bfloat16 stops growing at 256."""
    for value, width in ((100.0, 700), (1.0, 2000)):
        row = torch.full((width,), value, dtype=dtype)
        jagged = torch.nested.as_nested_tensor([row], layout=torch.jagged)
        mask = torch.nested.as_nested_tensor([torch.ones(width)], layout=torch.jagged)
        for mode in ("token-mean", "seq-mean-token-mean"):
            assert float(eq.agg_loss(row[None], torch.ones(1, width), mode)) == value
            assert float(eq.agg_loss(jagged, mask, mode)) == value
        assert float(eq.sft_loss(-row[None], torch.ones(1, width))[0]) == value


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch_num_tokens": -8, "dp_size": 2}, "batch_num_tokens must be a whole number of at least 0, got -8"),
        ({"batch_num_tokens": float("nan")}, "batch_num_tokens must be a whole number"),
        ({"batch_num_tokens": 2.9}, "batch_num_tokens must be a whole number of at least 0, got 2.9"),
        ({"batch_num_tokens": "a"}, "batch_num_tokens must be a whole number"),
        ({"dp_size": 0}, "dp_size must be a whole number of at least 1, got 0"),
    ],
)
def test_impossible_counts_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(eq.InvalidInput, match=text):
        eq.agg_loss(torch.ones(1, 4), torch.ones(1, 4), "token-mean", **settings)


@pytest.mark.parametrize(("make", "field"), [(eq.Metric.max, "largest"), (eq.Metric.min, "smallest")])
def test_an_extreme_is_one_number_without_a_graph(make: Callable[[torch.Tensor], Any], field: str) -> None:
    with pytest.raises(eq.InvalidInput, match=r"\(2,\)"):
        make(torch.zeros(2))
    found: torch.Tensor = getattr(make(torch.tensor([2.0], dtype=torch.bfloat16, requires_grad=True)), field)
    assert (found.shape, found.dtype, found.requires_grad, float(found)) == ((), torch.float32, False, 2.0)


def test_metrics_of_half_precision_keep_counting() -> None:
    one = eq.Metric(torch.tensor(1.0, dtype=torch.float16), torch.tensor(1, dtype=torch.uint8))
    total = one
    for _ in range(4999):
        total = total + one
    assert total.value == 1.0
    assert int(total.count) == 5000
    largest = [eq.Metric.max(float("nan")), eq.Metric.max(1.0)]
    assert all(str((a + b).value) == "nan" for a, b in (largest, reversed(largest)))


def test_segments_of_two_rows_are_sequences_of_their_own() -> None:
    """Row 0 has segments 1 to 3, row 1 only segment 1: with a span of one row's segments they would collide."""
    loss, mask = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]]), torch.ones(2, 3)
    segments = torch.tensor([[1, 2, 3], [1, 0, 0]])
    found = eq.agg_loss(loss, mask, "seq-mean-token-sum", segment_ids=segments)
    assert float(found) == (1 + 2 + 4 + 8) / 4
    squares = eq.agg_loss(loss, mask, "seq-mean-token-mean", segment_ids=torch.tensor([[1, 1, 2], [1, 2, 2]]))
    assert float(squares) == (1.5 + 4 + 8 + 0) / 4
