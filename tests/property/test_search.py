"""The parts of the search: its starts are whole layouts, and its steps keep what they must keep."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise import PaddedCost, StepSpec, TokenCost, plan_step
from equipoise.planning.partition.board import Boards, Moves, Rules
from equipoise.planning.partition.refine import even_out_loads, fit_cap, kick, polish
from equipoise.planning.step import search, starts
from equipoise.planning.step.composition import rank_rows
from equipoise.planning.step.layout import Layout, MiniBatch
from equipoise.planning.step.limits import roomiest
from equipoise.planning.step.pieces import Pieces

QUICK = settings(max_examples=150, deadline=None, derandomize=True)
IntArray = npt.NDArray[np.int64]


@st.composite
def mini_batches(draw: st.DrawFn) -> tuple[MiniBatch, int]:
    """A mini-batch with padding and unequal ranks, and a number of micro-batches that its ranks can fill."""
    dp = draw(st.integers(1, 6))
    fewest = draw(st.integers(1, 7))
    n = dp * fewest + draw(st.integers(0, dp - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = draw(st.sampled_from([rng.integers(0, 9, n), rng.integers(1, 9000, n), np.full(n, 5)]))
    padding = np.zeros(n, dtype=bool)
    padding[rng.permutation(n)[: draw(st.integers(0, n - 1))]] = True
    rows, real_rows = rank_rows(np.array([n]), np.array([int((~padding).sum())]), dp)
    mini = MiniBatch(
        cost=24576.0 * tokens + tokens.astype(np.float64) ** 2,
        tokens=tokens.astype(np.int64),
        padding=padding,
        rows=rows[0],
        real_rows=real_rows[0],
        fixed_rows=None,
    )
    return mini, draw(st.integers(1, fewest))


def _by_rule(mini: MiniBatch, num_columns: int, *, rule: str) -> IntArray:
    cell = starts.by_ranks(mini, starts.rank_by_rule(mini, rule), num_columns, rule, None)
    assert cell is not None
    return cell


STARTS: dict[str, Callable[[MiniBatch, int], IntArray]] = {
    "tiers": starts.by_tiers,
    "stripes": starts.by_stripes,
    "kk": functools.partial(_by_rule, rule="kk"),
    "lpt": functools.partial(_by_rule, rule="lpt"),
}


def check_cells(mini: MiniBatch, cell: IntArray, num_columns: int) -> None:
    assert set(cell.tolist()) == set(range(mini.dp_size * num_columns)), "no cell is empty"
    assert np.bincount(cell % mini.dp_size, minlength=mini.dp_size).tolist() == mini.rows.tolist()


@pytest.mark.parametrize("name", STARTS)
@QUICK
@given(mini_batches())
def test_a_start_fills_every_cell_and_gives_each_rank_its_rows(name: str, case: tuple[MiniBatch, int]) -> None:
    mini, num_columns = case
    cell = STARTS[name](mini, num_columns)
    check_cells(mini, cell, num_columns)
    real = cell[~mini.padding] % mini.dp_size
    assert np.bincount(real, minlength=mini.dp_size).tolist() == mini.real_rows.tolist()


@QUICK
@given(mini_batches())
def test_the_fold_has_the_most_room_where_a_cell_has_two_rows_at_most(case: tuple[MiniBatch, int]) -> None:
    mini, num_columns = case
    cell = starts.by_fold(mini, num_columns)
    check_cells(mini, cell, num_columns)
    cells = mini.dp_size * num_columns
    pairs = mini.cost.size - cells
    if 2 * pairs <= mini.cost.size and int(np.bincount(cell).max()) <= 2:
        shortest = np.sort(mini.tokens)[: 2 * pairs]
        least = int((shortest[:pairs] + shortest[::-1][:pairs]).max()) if pairs else 0
        assert Layout(mini, num_columns, cell).crowded_tokens() == least


@QUICK
@given(mini_batches(), st.sampled_from([1.0, 1.5, 3.0]))
def test_by_ranks_says_none_just_where_a_micro_batch_is_above_the_cap(
    case: tuple[MiniBatch, int], slack: float
) -> None:
    mini, num_columns = case
    mini_tokens = np.where(mini.padding, 0, mini.tokens)  # padding is placed afterwards
    cap = int(mini_tokens.max() * slack)
    rank = starts.rank_by_rule(mini, "kk")
    free, capped = (starts.by_ranks(mini, rank, num_columns, "kk", limit) for limit in (None, cap))
    assert free is not None
    if mini.padding.any():
        assert capped is None or capped.tolist() == free.tolist()
    else:
        assert (capped is None) == (not Layout(mini, num_columns, free).legal(cap))


@st.composite
def boards(draw: st.DrawFn) -> tuple[Boards, Rules]:
    """Boards filled at random, no cell empty, and rules for a search."""
    num_boards, ranks, columns = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    n = ranks * columns + draw(st.integers(0, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = np.clip(rng.lognormal(5.0, 1.2, (num_boards, n)), 1, 3000).astype(np.int64)
    cost = draw(st.sampled_from([tokens.astype(np.float64), tokens.astype(np.float64) ** 2, rng.random(tokens.shape)]))
    cells = ranks * columns
    cell = np.stack([np.append(np.arange(cells), rng.integers(0, cells, n - cells))] * num_boards)
    cell = rng.permuted(cell, axis=1)
    kind = draw(st.sampled_from([None, rng.integers(0, 2, (num_boards, n))]))
    moves: Moves = draw(st.sampled_from(["none", "rank", "any"]))
    if kind is not None and moves == "any":
        moves = "rank"
    cap = draw(st.sampled_from([None, 3000, 6000]))
    made = Boards(cost, tokens, cell, num_ranks=ranks, num_columns=columns, kind=kind)
    return made, Rules(cap=cap, moves=moves)


def _counts(values: IntArray, size: int) -> list[list[int]]:
    return [np.bincount(row, minlength=size).tolist() for row in values]


STEPS: dict[str, Callable[[Boards, Rules], object]] = {
    "even out": even_out_loads,
    "fit": fit_cap,
    "polish": polish,
}


@pytest.mark.parametrize("name", STEPS)
@QUICK
@given(boards())
def test_a_step_keeps_rows_counts_kinds_and_the_cap(name: str, case: tuple[Boards, Rules]) -> None:
    made, rules = case
    ranks, cells, n = made.num_ranks, made.num_cells, made.num_rows
    before: IntArray = np.array(made.cell)
    lone_or_within = _legal(made, rules)
    lockstep = made.lockstep()
    STEPS[name](made, rules)
    if rules.moves == "none":
        assert _counts(made.cell, cells) == _counts(before, cells)
    if rules.moves == "rank":
        assert _counts(made.cell % ranks, ranks) == _counts(before % ranks, ranks)
    if made.kind is not None:
        odd = made.kind[:, :n] == 1
        # the rank of rows of one kind, and a rank of its own for all others
        after, then = (np.where(odd, cell % ranks, ranks) for cell in (made.cell, before))
        assert _counts(after, ranks + 1) == _counts(then, ranks + 1)
    assert min(min(counts) for counts in _counts(made.cell, cells)) >= 1
    if name != "fit":
        assert (_legal(made, rules) | ~lone_or_within).all(), "what was within the cap stays within"
    if name == "polish":
        assert (made.lockstep() <= lockstep * (1 + 1e-9)).all()
    _check_books(made)


def _legal(made: Boards, rules: Rules) -> npt.NDArray[np.bool_]:
    if rules.cap is None:
        return np.ones(made.num_boards, dtype=bool)
    return np.asarray(((made.fill <= rules.cap) | (made.count == 1)).all(axis=1))


def _check_books(made: Boards) -> None:
    """Loads, tokens, counts and slots are those of the cells."""
    n, cells = made.num_rows, made.num_cells
    for j in range(made.num_boards):
        cell = made.cell[j]
        assert made.count[j].tolist() == np.bincount(cell, minlength=cells).tolist()
        assert np.allclose(made.load[j], np.bincount(cell, weights=made.cost[j, :n], minlength=cells), rtol=1e-9)
        assert made.fill[j].tolist() == np.bincount(cell, weights=made.tokens[j, :n], minlength=cells).tolist()
        for c in range(cells):
            size = int(made.count[j, c])
            assert sorted(made.slots[j, c, :size].tolist()) == np.flatnonzero(cell == c).tolist()
            assert (made.slots[j, c, size:] == n).all()


def test_the_levels_that_columns_should_reach_add_up() -> None:
    cost = np.array([[9.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]])
    made = Boards(cost, cost.astype(np.int64), np.array([[0, 0, 1, 1, 2, 2, 3, 3]]), num_ranks=2, num_columns=2)
    assert made.targets().tolist() == [[9.0, 9.0, 2.0, 2.0]]  # the longest row, and the longest of the others
    made = Boards(np.ones((1, 8)), np.ones((1, 8), dtype=np.int64), made.cell, num_ranks=2, num_columns=2)
    assert made.targets().tolist() == [[2.0] * 4]


def _roomy(candidates: list[list[Pieces]], spec: StepSpec) -> list[Layout | None]:
    return [roomiest(pieces[0].mini, spec) for pieces in candidates]


def test_plans_are_never_worse_than_the_rules_even_where_the_search_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The promise rests on a comparison, not on the quality of the search."""
    monkeypatch.setattr(search, "_refined", _roomy)
    best = {"kk": 0, "lpt": 0}
    for seed in range(40):
        lengths = np.random.default_rng(seed).integers(1, 4000, 32)
        spec = StepSpec(dp_size=4, num_mini_batches=2, max_token_len_per_gpu=8000)
        plan = plan_step(lengths, spec)
        kk = plan_step(lengths, dataclasses.replace(spec, algorithm="kk")).stats.lockstep_cost
        lpt = plan_step(lengths, dataclasses.replace(spec, algorithm="lpt")).stats.lockstep_cost
        assert plan.stats.lockstep_cost <= min(kk, lpt, plan.incoming.lockstep_cost) * (1 + 1e-9)
        best["kk" if kk < lpt else "lpt"] += 1
    assert min(best.values()) > 0, best


def test_the_batch_as_it_came_is_kept_where_nothing_better_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> list[Layout]:
        return []

    monkeypatch.setattr(search, "_refined", _roomy)
    monkeypatch.setattr(search, "_by_rules", nothing)
    lengths = [900, 100, 500, 500] * 2  # each rank's share costs the same as it comes
    plan = plan_step(lengths, StepSpec(dp_size=4, max_token_len_per_gpu=1000), cost=TokenCost())
    assert plan.stats.lockstep_cost == plan.incoming.lockstep_cost == 1000.0, "the roomiest costs 900 + 500"


@pytest.mark.parametrize("over", [0, 1])
def test_a_layout_is_legal_up_to_the_cap_and_not_a_token_above(over: int) -> None:
    mini = _mini([6, 4 + over, 3, 7])
    layout = Layout(mini, 1, np.array([0, 0, 1, 1]))
    assert layout.crowded_tokens() == 10 + over
    assert layout.legal(10) == (over == 0)
    assert layout.legal(None)
    assert Layout(mini, 2, np.array([0, 2, 1, 3])).legal(1), "lone rows may be above the cap"
    assert not Layout(mini, 2, np.array([0, 2, 1, 1])).legal(None), "a cell is empty"


@pytest.mark.parametrize("over", [0, 1])
def test_padded_tokens_are_legal_up_to_the_cap_and_not_a_token_above(over: int) -> None:
    mini = dataclasses.replace(_mini([5 + over, 1, 3, 2]), padded=PaddedCost())
    layout = Layout(mini, 1, np.array([0, 0, 1, 1]))
    assert layout.crowded_tokens() == 2 * (5 + over)
    assert layout.legal(10) == (over == 0)


@pytest.mark.parametrize("keep_groups", ["none", "rank", "micro"])
@pytest.mark.parametrize("algorithm", ["refined", "kk", "lpt"])
def test_a_cap_one_token_short_of_a_full_layout_takes_another_micro_batch(algorithm: Any, keep_groups: Any) -> None:
    """Whatever is kept together, the cap is hard: 2 ranks × 2 rows of 5 tokens fill 10 tokens, and not 9."""
    for cap, count in ((10, 1), (9, 2)):
        spec = StepSpec(dp_size=2, max_token_len_per_gpu=cap, keep_groups=keep_groups, algorithm=algorithm)
        ids = [0, 1, 2, 3] if keep_groups == "micro" else [0, 0, 1, 1]
        plan = plan_step([5] * 4, spec, group_ids=ids)
        assert plan.num_micro_batches == (count,)
        assert plan.stats.max_tokens == 10 // count


def _mini(tokens: list[int]) -> MiniBatch:
    """Rows of these tokens, on two ranks."""
    rows = np.full(2, len(tokens) // 2)
    return MiniBatch(
        cost=np.array(tokens, dtype=np.float64),
        tokens=np.array(tokens),
        padding=np.zeros(len(tokens), dtype=bool),
        rows=rows,
        real_rows=rows,
        fixed_rows=None,
    )


@pytest.mark.parametrize("columns", [1, 2])
def test_kicks_keep_every_rule_and_never_cost_more(columns: int) -> None:
    won = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tokens = np.clip(rng.lognormal(5.0, 1.2, 12), 1, 3000).astype(np.int64)
        cap = max(int(tokens.max()), int(tokens.sum()) * 4 // (9 * columns))
        made = Boards(
            tokens[None].astype(np.float64) ** 1.5,
            tokens[None],
            rng.permutation(np.arange(12) % (3 * columns))[None],
            num_ranks=3,
            num_columns=columns,
        )
        rules = Rules(cap=cap, moves="none" if columns == 1 else "rank")
        if not fit_cap(made, rules).all():
            continue
        polish(made, rules)
        before = made.lockstep_of(0)
        kick(made, rules, goals=np.zeros(1), num_kicks=20)
        assert made.lockstep_of(0) <= before * (1 + 1e-9)
        assert _legal(made, rules).all()
        assert np.bincount(made.cell[0] % 3).tolist() == [4, 4, 4]
        _check_books(made)
        won += made.lockstep_of(0) < before * (1 - 1e-6)
    assert won >= 1
