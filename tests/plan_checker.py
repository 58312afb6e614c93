"""One checker of plans: everything is worked out anew from the rows of each micro-batch, and compared with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise import PlanStats, StepPlan, StepSpec

REL = 1e-9


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the micro-batches cost, worked out row by row."""

    lockstep_cost: float
    rank_cost: float
    ideal: float
    bound: float


def transformer_costs(lengths: Sequence[int]) -> list[float]:
    """24576·L + L² in Python's whole numbers."""
    return [float(24576 * length + length * length) for length in lengths]


def check_plan(
    plan: StepPlan,
    lengths: Sequence[int],
    spec: StepSpec,
    *,
    is_padding: Sequence[bool] | None = None,
    costs: Sequence[float] | None = None,
) -> Figures:
    """Raise AssertionError where the plan breaks a promise; return its figures."""
    padding = [False] * len(lengths) if is_padding is None else [bool(flag) for flag in is_padding]
    costs = transformer_costs(lengths) if costs is None else costs
    rows = [
        [[ids.tolist() for ids in micro_batches] for micro_batches in plan.micro_batches(rank)]
        for rank in range(spec.dp_size)
    ]  # [rank][mini-batch][micro-batch] -> rows
    _check_rows(plan, rows, len(lengths))
    _check_counts(rows, spec, len(lengths))
    _check_cap(rows, lengths, spec)
    _check_mini_batches(plan, rows, padding, spec)
    figures = _figures(rows, costs, spec)
    _check_stats(plan.stats, rows, lengths, padding, figures)
    return figures


def _check_rows(plan: StepPlan, rows: list[list[list[list[int]]]], n: int) -> None:
    flat = [row for rank in rows for mini in rank for micro in mini for row in micro]
    assert sorted(flat) == list(range(n)), "each row once"
    assert flat == plan.order.tolist(), "order is rank-major, then mini-batch, then micro-batch"
    assert plan.order[plan.inverse].tolist() == list(range(n)), "inverse undoes order"
    for rank, mine in enumerate(rows):
        assert plan.rank_rows(rank).tolist() == [row for mini in mine for micro in mini for row in micro]


def _check_counts(rows: list[list[list[list[int]]]], spec: StepSpec, n: int) -> None:
    for rank in rows:
        assert len(rank) == spec.num_mini_batches, "as many optimizer steps as asked for, on every rank"
    for j in range(spec.num_mini_batches):
        counts = {len(rank[j]) for rank in rows}
        assert len(counts) == 1, f"the same number of micro-batches on every rank, got {counts}"
        count = counts.pop()
        assert count >= spec.min_micro_batches
        assert count % spec.micro_batch_multiple == 0, "a multiple"
        assert all(micro for rank in rows for micro in rank[j]), "no micro-batch is empty"
        sizes = [sum(len(micro) for micro in rank[j]) for rank in rows]
        assert max(sizes) - min(sizes) <= (0 if spec.equal_count else 1), f"rows of a mini-batch by rank: {sizes}"
        if spec.micro_batch_size_per_gpu is not None:
            assert {len(micro) for rank in rows for micro in rank[j]} == {spec.micro_batch_size_per_gpu}
    totals = [sum(len(micro) for mini in rank for micro in mini) for rank in rows]
    assert max(totals) - min(totals) <= (0 if spec.equal_count else 1), f"rows by rank: {totals}"
    assert sum(totals) == n


def _check_cap(rows: list[list[list[list[int]]]], lengths: Sequence[int], spec: StepSpec) -> None:
    if spec.max_token_len_per_gpu is None:
        return
    cap = spec.max_token_len_per_gpu * spec.sp_size
    for micro in (micro for rank in rows for mini in rank for micro in mini):
        tokens = sum(int(lengths[row]) for row in micro)
        alone = spec.oversize == "alone" and len(micro) == 1
        assert tokens <= cap or alone, f"{tokens} tokens in {len(micro)} rows, cap {cap}"


def _check_mini_batches(
    plan: StepPlan, rows: list[list[list[list[int]]]], padding: Sequence[bool], spec: StepSpec
) -> None:
    steps = [sorted(row for rank in rows for micro in rank[j] for row in micro) for j in range(spec.num_mini_batches)]
    real = [[row for row in step if not padding[row]] for step in steps]
    assert all(real), "each optimizer step has real rows"
    assert plan.num_real_rows.tolist() == [len(step) for step in real]
    assert max(map(len, steps)) - min(map(len, steps)) <= (0 if spec.equal_count else 1)
    spread = max(map(len, real)) - min(map(len, real))
    assert spread <= max(spec.dp_size, 1), f"real rows of the steps differ by {spread}"
    if spec.composition == "keep":
        in_order = [row for step in real for row in step]
        assert in_order == sorted(in_order), "keep: a later step has no earlier real row"
        if not any(padding):
            assert [row for step in steps for row in step] == list(range(len(padding))), "keep: contiguous blocks"


def _figures(rows: list[list[list[list[int]]]], costs: Sequence[float], spec: StepSpec) -> Figures:
    lockstep = rank_cost = ideal = bound = 0.0
    for j in range(spec.num_mini_batches):
        loads = [[sum(costs[row] for row in micro) for micro in rank[j]] for rank in rows]
        lockstep += sum(max(column) for column in zip(*loads, strict=True))
        totals = [sum(load) for load in loads]
        longest = max(costs[row] for rank in rows for micro in rank[j] for row in micro)
        mean = sum(totals) / len(totals)
        rank_cost += max(totals)
        ideal += mean
        bound += max(mean, longest)
    return Figures(lockstep_cost=lockstep, rank_cost=rank_cost, ideal=ideal, bound=bound)


def _check_stats(
    stats: PlanStats,
    rows: list[list[list[list[int]]]],
    lengths: Sequence[int],
    padding: Sequence[bool],
    figures: Figures,
) -> None:
    for name in ("lockstep_cost", "rank_cost", "ideal", "bound"):
        assert np.isclose(getattr(stats, name), getattr(figures, name), rtol=REL, atol=0.0), name
    slack = 1 + REL
    assert figures.ideal <= figures.bound * slack
    assert figures.bound <= figures.rank_cost * slack
    assert figures.rank_cost <= figures.lockstep_cost * slack
    assert stats.efficiency <= slack
    micro_batches = [micro for rank in rows for mini in rank for micro in mini]
    assert stats.max_tokens == max(sum(int(lengths[row]) for row in micro) for micro in micro_batches)
    assert stats.num_micro_batches * len(rows) == len(micro_batches)
    assert stats.num_padding == sum(padding)


def incoming_is_legal(spec: StepSpec) -> bool:
    """Contiguous shares filled in order are a plan whenever ranks have equal rows and any count of micro-batches goes.

    (A rank's share can always be split down to single rows, and single rows are within the cap or alone.)
    """
    return spec.equal_count and spec.micro_batch_multiple == 1
