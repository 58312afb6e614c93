"""The peers' rules of the benchmark: each row once, and what each rule promises of itself."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import baseline, tables
from benchmarks.cases import Case, Size, cases
from benchmarks.clock import Clock, OverBudget, budget
from benchmarks.lengths import SETS, TRACES_VARIABLE, draw
from benchmarks.measure import BrokenLayout, measure
from benchmarks.peers import PEERS
from benchmarks.rules.verl import pack_together
from benchmarks.run import Run, available, run_cases
from benchmarks.verl_rule import MicroBatches, verl_micro_batches

CAP_NOT_CHECKED = {"MindSpeed-RL", "slime by FLOPs"}
STEPS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 6), st.integers(0, 10**6), st.integers(0, 40))


def lay_out(name: str, step: tuple[int, int, int, int, int]) -> tuple[list[int], MicroBatches, int]:
    dp_size, num_mini_batches, each, seed, slack = step
    rng = random.Random(seed)
    lengths = [int(rng.lognormvariate(3, 1)) + 1 for _ in range(dp_size * num_mini_batches * each)]
    cap = max(lengths) + slack
    layout = PEERS[name](lengths, dp_size=dp_size, num_mini_batches=num_mini_batches, max_token_len=cap, clock=Clock())
    return lengths, layout, cap


@pytest.mark.parametrize("name", PEERS)
@settings(max_examples=25, deadline=None)
@given(step=STEPS)
def test_lays_out_each_row_once_with_equal_counts(name: str, step: tuple[int, int, int, int, int]) -> None:
    lengths, layout, cap = lay_out(name, step)
    figures = measure(layout, lengths, num_mini_batches=step[1], max_token_len=cap)
    assert len(layout) == step[0]
    assert {len(rank) for rank in layout} == {step[1]}
    assert figures.ragged == 0
    assert figures.lockstep >= figures.rank - 1e-12 >= figures.own_bound - 2e-12
    if name not in CAP_NOT_CHECKED:
        assert figures.rows_over == 0
        assert all(micro for rank in layout for mini in rank for micro in mini)


@settings(max_examples=25, deadline=None)
@given(step=STEPS)
def test_packs_as_the_engine_of_verl_does(step: tuple[int, int, int, int, int]) -> None:
    dp_size, num_mini_batches, each, *_ = step
    lengths, layout, cap = lay_out("verl", step)
    assert layout == verl_micro_batches(lengths, dp_size=dp_size, num_mini_batches=num_mini_batches, max_token_len=cap)
    for mini in zip(*layout, strict=True):
        shares = [sorted(row for micro in micros for row in micro) for micros in mini]
        assert {len(share) for share in shares} == {each}
        assert pack_together(shares, lengths, cap) == list(mini)


def test_measures_by_hand() -> None:
    layout = [[[[0, 3]]], [[[1], [2]]]]
    figures = measure(layout, [4, 3, 2, 1], num_mini_batches=1, max_token_len=4)
    cost = [24576 * length + length * length for length in (4, 3, 2, 1)]
    bound = sum(cost) / 2
    assert figures.lockstep == pytest.approx((max(cost[0] + cost[3], cost[1]) + cost[2]) / bound)
    assert figures.rank == pytest.approx((cost[0] + cost[3]) / bound)
    assert (figures.num_micro_batches, figures.least, figures.rows_over, figures.ragged) == (2, 2, 2, 1)
    assert figures.fullest == pytest.approx(5 / 4)


def test_refuses_a_layout_that_loses_a_row() -> None:
    with pytest.raises(BrokenLayout):
        measure([[[[0]]], [[[1]]]], [4, 3, 2, 1], num_mini_batches=1, max_token_len=8)


def in_order(case: Case, _clock: Clock) -> MicroBatches:
    rows = iter(range(case.size.rows))
    share = case.size.rows // (case.size.dp_size * case.size.num_mini_batches)
    order = [
        [[next(rows) for _ in range(share)] for _ in range(case.size.dp_size)]
        for _ in range(case.size.num_mini_batches)
    ]
    return [[[[row] for row in step[rank]] for step in order] for rank in range(case.size.dp_size)]


def never(_case: Case, _clock: Clock) -> MicroBatches:
    while True:
        pass


def small_run() -> Run:
    planners = {"Equipoise": in_order, "verl": in_order, "slow": never}
    steps = cases(["lognormal", "bimodal"], [Size.parse("16x2x2")], [0, 1])
    return run_cases(steps, planners, repeats=1, budget_s=0.2, tick=lambda case, name: None)


def test_draws_the_same_rows_from_a_seed() -> None:
    for name in ("lognormal", "bimodal", "thinking"):
        assert draw(name, 50, 3).tolist() == draw(name, 50, 3).tolist() != draw(name, 50, 4).tolist()
        assert draw(name, 500, 0).min() >= 1


def test_leaves_out_traces_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path))
    (tmp_path / "azure_llm_2023_code.csv").write_text("prompt_len,response_len\n10,5\n")
    said: list[str] = []
    assert available(SETS, said.append) == ["lognormal", "bimodal", "thinking", "code"]
    assert draw("code", 2, 0).tolist() == [15, 15]
    assert len(said) == 1
    assert str(tmp_path) in said[0]
    assert TRACES_VARIABLE in said[0]


def test_stops_a_planner_that_is_over_its_budget() -> None:
    case = next(iter(cases(["lognormal"], [Size.parse("16x2x2")], [0])))
    start = time.process_time()
    with pytest.raises(OverBudget), budget(0.1):
        never(case, Clock())
    assert time.process_time() < start + 10


def test_says_what_it_skipped() -> None:
    run = small_run()
    slow = [record for record in run.records if record.planner == "slow"]
    assert len(slow) == len(run.records) / 3
    assert all(record.figures is None and "over 0.2 s" in record.skipped for record in slow)
    assert "over 0.2 s" in tables.report(run, [], [])


def test_finds_what_got_worse(tmp_path: Path) -> None:
    run = small_run()
    path = tmp_path / "baseline.json"
    baseline.write(run, path)
    before = baseline.read(path)
    assert before is not None
    assert baseline.worse(run, before)[0] == []
    cell = run.cells()[0]
    for seed in before["cells"][cell]["Equipoise"]["lockstep"]:
        before["cells"][cell]["Equipoise"]["lockstep"][seed] *= 0.99
    (line,) = baseline.worse(run, before)[0]
    assert cell in line
