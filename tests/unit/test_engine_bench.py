"""The engine benchmark: equal work on both sides, ratios the right way round, failures told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import engine_table
from benchmarks.engine_case import PROMPT, EngineCase, log_normal_lengths, write_tiny_llama
from benchmarks.engine_measure import PEER, Pair, UnequalWork, check, measure, runs, turns
from benchmarks.engine_ranks import JOBS, EngineProcesses, RankFailed

OURS = "equipoise fsdp2"


def case_of(model: Path, vocabulary: int = 8) -> EngineCase:
    lengths = log_normal_lengths(8, 400, 120)
    return EngineCase(model=model, vocabulary=vocabulary, lengths=lengths, max_token_len=128)


def pair_of(ours_s: list[float], peer_s: list[float], *, ours_mib: float = 90.0) -> Pair:
    times = {job: {OURS: ours_s, PEER: peer_s} for job in JOBS}
    return Pair(
        name=OURS,
        world=2,
        tokens=600,
        seconds=times,
        processor_s=times,
        peak_mib={job: {OURS: ours_mib, PEER: 100.0} for job in JOBS},
        micro_batches={OURS: 3, PEER: 3},
        apart={"log-probs": 1e-6, "loss": 1e-7, "grad_norm": 1e-6},
    )


def test_ranks_share_all_rows_and_draw_them_alike() -> None:
    case = case_of(Path("none"))
    shares = [case.share(rank, 2) for rank in range(2)]
    assert sorted(shares[0] + shares[1]) == list(range(8))
    assert len(shares[0]) == len(shares[1])
    assert all(torch.equal(case.row(3)[name], case.row(3)[name]) for name in case.row(3))
    assert [case.row(i)["input_ids"].numel() for i in range(8)] == list(case.lengths)
    assert min(case.lengths) > PROMPT
    assert max(case.lengths) <= 120


def test_engines_go_first_in_turn() -> None:
    order = turns("a", "b", 4)
    assert order == list("abbaabba")
    assert order.count("a") == order.count("b") == 4


def test_ratio_above_one_is_faster() -> None:
    pair = pair_of([2.0, 1.0, 4.0], [3.0, 3.0, 3.0])
    assert pair.speed("update") == (1.5, 0.75, 3.0)
    assert pair.memory("update") == pytest.approx(0.9)
    assert engine_table.behind([pair]) == []
    table = engine_table.report([pair])
    assert "300 (×1.50, 0.75–3.00; ×1.50)" in table  # 600 tokens in 2 s
    assert "90 MiB (×0.90)" in table


def test_says_where_it_is_behind() -> None:
    lines = engine_table.behind([pair_of([4.0], [3.0], ours_mib=110.0)])
    assert len(lines) == 2 * len(JOBS)
    assert any(line.startswith("equipoise fsdp2 on 2 ranks, update: 0.75 times verl's speed") for line in lines)
    assert any("update: 110 MiB where verl needs 100" in line for line in lines)


@pytest.mark.parametrize("figure", ["log-probs", "loss", "grad_norm"])
@pytest.mark.parametrize("apart", [0.01, float("nan")])
def test_refuses_to_compare_unequal_work(figure: str, apart: float) -> None:
    pair = pair_of([1.0], [1.0])
    check(pair)
    pair.apart[figure] = apart
    with pytest.raises(UnequalWork, match=figure):
        check(pair)


@pytest.mark.slow
def test_tells_why_a_rank_failed(tmp_path: Path) -> None:
    engine = EngineProcesses(OURS, case_of(tmp_path / "no model"), world=1, threads=1, log=tmp_path / "log")
    try:
        with pytest.raises(RankFailed, match=r"(?s)equipoise fsdp2, rank 0.*no model"):
            engine.wait()
    finally:
        engine.close()


@pytest.mark.slow
def test_measures_a_tiny_model_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    case = case_of(tmp_path, write_tiny_llama(tmp_path))
    ticks: list[str] = []
    pair = measure(case, OURS, world=2, threads=1, repeats=2, log=tmp_path / "log", tick=ticks.append)
    assert len(ticks) == runs(2)
    assert all(len(times) == 2 and min(times) > 0 for job in JOBS for times in pair.seconds[job].values())
    assert all(min(times) > 0 for job in JOBS for times in pair.processor_s[job].values())
    assert set(pair.apart) == {"log-probs", "loss", "grad_norm"}
    assert all(0 <= apart < 1e-4 for apart in pair.apart.values())
    assert all(count >= 2 for count in pair.micro_batches.values())  # 200 tokens a rank under a cap of 128
