"""Loss, gradient and logged numbers do not move with the cluster: against plain loops, float64, 1e-12."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch

import equipoise as eq
from equipoise.training.loss import aggregation
from tests.numerics.loss_plain import Plain, Settings, plain_step
from tests.numerics.loss_rig import (
    Layout,
    count,
    distance,
    lay_out,
    make_rows,
    make_table,
    masked,
    padding_row,
    share,
    tensors,
    train_step,
)

EXACT = 1e-12
ROWS = 13
SETTINGS = Settings()
LOSSES = (*eq.policy_losses, "value", "sft")
PAIRS = [
    (name, mode)
    for name in LOSSES
    for mode in (eq.policy_losses[name].agg_modes if name in eq.policy_losses else aggregation.MODES)
]

# every rank count with every way to cut, the other choices in turn
CUTS = tuple(itertools.product((1, 2, 4, 8), ("fixed", "dynamic", "planned")))
JAGGED = (2, 4, 7)  # few: torch takes ten times as long for them
LAYOUTS = [
    Layout(
        dp_size=dp_size,
        cut=cut,
        padding=i % 2,
        padding_mask=(i // 2) % 2,
        shuffled=None if i % 3 == 0 else i,
        form="jagged" if i in JAGGED else ("padded", "packed")[(i // 3) % 2],
        wider=i % 3,
    )
    for i, (dp_size, cut) in enumerate(CUTS)
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of a few numbers are slower with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def reference(name: str, mode: str) -> Plain:
    return plain_step(make_rows(ROWS), make_table(), name, mode, SETTINGS)


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_every_loss_and_mode_on_every_cluster(name: str, mode: str) -> None:
    """Cases D2, D3, E7, F1 and C7: ranks × micro-batches × padding rows × row order × storage."""
    want = reference(name, mode)
    for layout in LAYOUTS:
        found = train_step(ROWS, layout, name, mode, SETTINGS)
        assert distance(found, want) < EXACT, layout


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_one_loss_over_the_whole_product_of_layouts(form: str) -> None:
    want = reference("grpo", "seq-mean-token-mean")
    product = itertools.product((1, 2, 4, 8), ("whole", "fixed", "dynamic", "planned"), (0, 1), (None, 7))
    for i, (dp_size, cut, padding, shuffled) in enumerate(product):
        layout = Layout(
            dp_size=dp_size, cut=cut, padding=padding, padding_mask=i % 2, shuffled=shuffled, form=form, wider=i % 3
        )
        found = train_step(ROWS, layout, "grpo", "seq-mean-token-mean", SETTINGS)
        assert distance(found, want) < EXACT, layout


def test_the_layouts_are_what_they_are_called() -> None:
    """The proof would be empty if they were all alike."""
    real = make_rows(ROWS)
    dynamic = lay_out(real, Layout(dp_size=4, cut="dynamic"))
    assert len({len(rank) for rank in dynamic}) == 1
    assert any(all(row.is_padding for row in micro) for rank in dynamic for micro in rank), "no zero-weight micro-batch"
    planned = lay_out(real, Layout(dp_size=4, cut="planned", padding=1))
    assert sum(not row.is_padding for rank in planned for micro in rank for row in micro) == ROWS
    assert planned != lay_out(real, Layout(dp_size=4, cut="dynamic", padding=1))
    assert {layout.form for layout in LAYOUTS} == {"padded", "packed", "jagged"}
    assert {layout.padding_mask for layout in LAYOUTS if layout.padding} == {0, 1}


def test_the_reference_meets_every_clip() -> None:
    for name, keys in {"ppo": ("pg_clipfrac", "pg_clipfrac_lower"), "gspo": ("pg_clipfrac",)}.items():
        for key in keys:
            assert 0 < reference(name, "token-mean").metrics[key] < 1
    assert 0 < reference("value", "token-mean").metrics["vf_clipfrac"] < 1


@pytest.mark.parametrize(("name", "mode"), [("grpo", "token-mean"), ("gspo", "seq-mean-token-mean")])
def test_float32_stays_within_its_bound(name: str, mode: str) -> None:
    """Float32 with sums of some 60 tokens: 2e-6 of what is summed, here of the order of 1."""
    want = reference(name, mode)
    gaps = [distance(train_step(ROWS, layout, name, mode, SETTINGS, torch.float32), want) for layout in LAYOUTS]
    assert max(gaps) < 2e-6
    assert max(gaps) > EXACT, "this was float64"


@pytest.mark.parametrize(
    ("name", "mode"), [("ppo", "token-mean"), ("gspo", "seq-mean-token-mean"), ("value", "token-mean")]
)
def test_what_does_not_hold_denominators_of_each_micro_batch(name: str, mode: str) -> None:
    """A mean per micro-batch, averaged over them, is another loss and another gradient."""
    table = torch.tensor(make_table(), dtype=torch.float64, requires_grad=True)
    (rank,) = lay_out(make_rows(ROWS), Layout(cut="dynamic"))
    assert len(rank) > 2
    loss = 0.0
    for micro in rank:
        batch = tensors(micro, "padded")
        found, _ = share(name, mode, batch, table, SETTINGS, count(batch), 1)
        (found / len(rank)).backward()
        loss += found.item() / len(rank)
    assert table.grad is not None
    want = reference(name, mode)
    assert abs(loss - want.loss) > 1e-3
    assert (table.grad - torch.tensor(want.gradient)).abs().max() > 1e-3


def test_what_does_not_hold_denominators_of_each_rank() -> None:
    """Nor is the mean over ranks of each rank's own mean."""
    want = reference("ppo", "token-mean")
    table = torch.tensor(make_table(), dtype=torch.float64)
    losses: list[float] = []
    for rank in lay_out(make_rows(ROWS), Layout(dp_size=2, cut="whole")):
        batch = tensors(rank[0], "padded")
        losses.append(share("ppo", "token-mean", batch, table, SETTINGS, count(batch), 1)[0].item())
    assert abs(sum(losses) / 2 - want.loss) > 1e-3


def test_what_does_not_hold_padding_with_a_mask_of_ones_that_nobody_is_told_of() -> None:
    rows = [*make_rows(ROWS), padding_row(1)]
    batch = tensors(rows, "padded")
    assert eq.LossDenominators.of(batch.mask).num_rows == ROWS + 1
    assert count(batch).num_rows == ROWS


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_a_micro_batch_without_a_token_is_exactly_nothing(name: str, mode: str) -> None:
    """I1, C7: loss 0 and gradient 0, in the graph, even where everything masked is NaN or infinite."""
    table = torch.tensor(make_table(), dtype=torch.float64, requires_grad=True)
    whole = count(tensors(make_rows(ROWS), "padded"))
    for counts in (whole, eq.LossDenominators(num_tokens=0, num_rows=0)):  # of a micro-batch, of a whole step
        batch = tensors([masked(row) for row in make_rows(3)] + [padding_row(1)], "padded")
        loss, metrics = share(name, mode, batch, table, SETTINGS, counts, 4)
        assert loss.requires_grad
        (gradient,) = torch.autograd.grad(loss, table)
        assert loss.item() == 0
        assert (gradient == 0).all()
        assert eq.metric_values(metrics) == {}
        assert all(metric.value == 0 for metric in metrics.values() if isinstance(metric, eq.Metric))


def test_an_empty_optimizer_step_is_known_as_such() -> None:
    rows = [masked(row) for row in make_rows(3)]
    assert count(tensors(rows, "padded")).is_empty
    assert not count(tensors(make_rows(3), "padded")).is_empty


def test_from_plan_counts_what_the_ranks_count() -> None:
    """D3: the driver knows the denominators of each optimizer step without a collective."""
    rows = [*make_rows(ROWS), *(padding_row(1) for _ in range(3))]
    spec = eq.StepSpec(dp_size=2, num_mini_batches=2, max_token_len_per_gpu=24)
    is_padding = [row.is_padding for row in rows]
    plan = eq.plan_step([row.length for row in rows], spec, is_padding=is_padding)
    found = eq.LossDenominators.from_plan(plan, [sum(row.mask) for row in rows], is_padding=is_padding)
    for step, counts in enumerate(found):
        ids = [int(i) for rank in range(2) for micro in plan.micro_batches(rank)[step] for i in micro]
        assert counts == count(tensors([rows[i] for i in ids], "padded"))
    assert sum(counts.num_rows for counts in found) == ROWS
    with pytest.raises(eq.InvalidInput, match="is_padding"):
        eq.LossDenominators.from_plan(plan, [sum(row.mask) for row in rows])
    with pytest.raises(eq.InvalidInput, match=r"loss_tokens.*\b16\b.*got 2"):
        eq.LossDenominators.from_plan(plan, [1, 2])
