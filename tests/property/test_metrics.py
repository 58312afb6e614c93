"""Metrics: however a step is cut and merged, the same number."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.training.loss.metrics import AnyMetric, MaxMetric

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
NUMBERS = st.floats(-1e3, 1e3)
VALUES = st.lists(NUMBERS, min_size=1, max_size=30)


def merged(values: list[float], cuts: list[int]) -> dict[str, AnyMetric]:
    """The values in pieces, each as a micro-batch would log it."""
    ends = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    parts: list[dict[str, AnyMetric]] = []
    for start, end in itertools.pairwise(ends):
        piece = torch.tensor(values[start:end], dtype=torch.float64)
        parts.append({"mean": eq.Metric.of(piece, torch.ones(end - start))})
        if end > start:
            parts[-1] |= {"high": eq.Metric.max(piece.max()), "low": eq.Metric.min(piece.min())}
    return eq.merge_metrics(parts)


@QUICK
@given(VALUES, st.lists(st.integers(0, 100), max_size=6))
def test_the_pieces_do_not_matter(values: list[float], cuts: list[int]) -> None:
    found = eq.metric_values(merged(values, cuts))
    assert found["mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-12, abs=1e-12)
    assert (found["high"], found["low"]) == (max(values), min(values))


@QUICK
@given(st.lists(st.tuples(NUMBERS, st.integers(0, 9)), min_size=3, max_size=3))
def test_merging_has_no_order_and_a_neutral_element(parts: list[tuple[float, int]]) -> None:
    a, b, c = (eq.Metric(total, count) for total, count in parts)
    nothing = eq.Metric(0, 0)
    assert (a + b).value == (b + a).value
    assert (a + nothing).value == a.value
    assert ((a + b) + c).sum == pytest.approx(float((a + (b + c)).sum), abs=1e-9)
    assert ((a + b) + c).count == (a + (b + c)).count


def test_micro_batches_of_8_and_2_log_the_same_number() -> None:
    values, mask = torch.arange(32.0).reshape(16, 2), torch.ones(16, 2)
    mask[3:9, 1] = 0

    def logged(rows: int) -> float:
        parts = [eq.Metric.of(values[i : i + rows], mask[i : i + rows]) for i in range(0, 16, rows)]
        return sum(parts[1:], parts[0]).value

    assert logged(8) == logged(2) == float(values[mask.bool()].double().mean())


def test_four_mini_batches_twice_log_a_loss_per_optimizer_step() -> None:
    """The mean of eight steps, not their sum, however many micro-batches each had."""
    steps: list[dict[str, AnyMetric]] = []
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    for i, target in enumerate(losses):
        mask = torch.ones(4, 2)
        log_prob = torch.full((4, 2), -target, dtype=torch.float64)
        size = (4, 2, 1)[i % 3]
        counts = eq.LossDenominators.of(mask)
        for mode in ("token-mean", "token-sum"):
            for j in range(0, 4, size):
                _, metrics = eq.sft_loss(
                    log_prob[j : j + size], mask[j : j + size], loss_agg_mode=mode, denominators=counts, prefix=mode
                )
                steps.append(metrics)
    found = eq.metric_values(eq.merge_metrics(steps))
    assert found["token-meanloss"] == pytest.approx(4.5, abs=1e-12)
    assert found["token-sumloss"] == pytest.approx(8 * 4.5, abs=1e-12)  # eight tokens a step


def test_kl_of_two_equal_micro_batches() -> None:
    parts = [{"kl": eq.Metric.of(torch.full((2, 5), kl, dtype=torch.float64), torch.ones(2, 5))} for kl in (0.1, 0.3)]
    assert eq.merge_metrics(parts)["kl"].value == pytest.approx(0.2, abs=1e-15)


def test_kinds_do_not_mix_whatever_the_name() -> None:
    largest: AnyMetric = eq.Metric.max(1.0)
    with pytest.raises(eq.InvalidInput, match=r"other.*'MaxMetric'"):
        eq.Metric(1, 1).merge(largest)
    with pytest.raises(eq.InvalidInput, match=r"'x'.*MinMetric.*'MaxMetric'"):
        eq.merge_metrics([{"x": eq.Metric.min(1.0)}, {"x": largest}])
    named_max: dict[str, AnyMetric] = {"ratio_max": eq.Metric(4.0, 2)}
    assert eq.merge_metrics([named_max, named_max])["ratio_max"].value == 2.0


def test_a_metric_keeps_no_graph_and_cannot_be_changed() -> None:
    total = torch.ones((), requires_grad=True) * 2
    metric = eq.Metric(total, 1)
    assert isinstance(metric.sum, torch.Tensor)
    assert not metric.sum.requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        metric.sum = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_masked_nan_is_not_logged_and_nothing_is_left_out_in_silence() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0])
    assert eq.Metric.of(values, torch.tensor([1, 0, 1])).value == 2.0
    assert math.isnan(eq.Metric.of(values, torch.ones(3)).value)


def test_jagged_values_are_logged_like_padded_ones() -> None:
    values = torch.nested.as_nested_tensor([torch.tensor([1.0, 5.0]), torch.tensor([3.0])], layout=torch.jagged)
    mask = torch.nested.as_nested_tensor([torch.tensor([1, 0]), torch.tensor([1])], layout=torch.jagged)
    assert eq.Metric.of(values, mask).value == 2.0
    with pytest.raises(eq.InvalidInput, match=r"values.*\(3,\).*\(1,\)"):
        eq.Metric.of(torch.ones(1), torch.ones(3))


def test_what_counted_nothing_is_left_out() -> None:
    empty: dict[str, AnyMetric] = {
        "mean": eq.Metric(0, 0),
        "high": eq.Metric.max(-math.inf),
        "low": eq.Metric.min(math.inf),
    }
    assert eq.metric_values(empty) == {}
    assert all(metric.is_empty for metric in empty.values())
    assert (eq.Metric.max(-math.inf) + MaxMetric(2.0)).value == 2.0


def test_wrong_parts_are_refused() -> None:
    with pytest.raises(eq.InvalidInput, match=r"count.*-1"):
        eq.Metric(1, -1)
    with pytest.raises(eq.InvalidInput, match="sum"):
        eq.Metric(torch.ones(2), 1)
    with pytest.raises(eq.InvalidInput, match=r"'x'.*float 1.0"):
        eq.reduce_metrics({"x": 1.0})  # pyright: ignore[reportArgumentType]


def test_without_a_group_the_reduced_are_the_same() -> None:
    metrics: dict[str, AnyMetric] = {"b": eq.Metric(1, 2), "a": eq.Metric.max(3)}
    assert list(eq.reduce_metrics(metrics)) == ["a", "b"]
    assert eq.reduce_metrics(metrics) == metrics
