"""The simulation of rollouts: exact against a loop over steps, and what it finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import equipoise as eq
from equipoise._arrays import IntArray
from equipoise.cli import main
from equipoise.report.compare import Comparison, bound_seconds, compare
from equipoise.report.policies import Ours, contestants, recipe, siblings_apart, side_by_side
from equipoise.report.setting import LengthLaw, Responses, Setting
from equipoise.report.simulation import Policy, Snapshot, simulate

LAW = LengthLaw(median=120.0, longest=900)
TIERS = np.array([4, 8, 16, 32, 64])


def step_by_step(responses: Responses, rank: IntArray, setting: Setting, policy: Policy | None) -> tuple[float, int]:
    """Seconds and moves, from a plain loop over decode steps."""
    todo: list[list[int]] = [[i for i in range(rank.size) if rank[i] == r] for r in range(setting.num_ranks)]
    generated: dict[int, int] = {}
    finished: list[int] = []
    seconds, moves, step = 0.0, 0, 0
    while any(todo):
        for held in todo:
            for i in held[: setting.places]:
                generated.setdefault(i, 0)
        running = [[i for i in held if i in generated] for held in todo]
        tier = int(TIERS[np.searchsorted(TIERS, max(map(len, running)))])
        context = max(sum(generated[i] + int(responses.prompt_tokens[i]) for i in held) for held in running)
        seconds += setting.step_time(tier, context)
        step += 1
        for held in running:
            for i in held:
                generated[i] += 1
                if generated[i] == responses.length[i]:
                    finished.append(i)
        # a place that falls free is taken in the same step
        todo = [[i for i in held if generated.get(i, 0) < responses.length[i]] for held in todo]
        if policy is None or step % setting.check_interval or not any(todo):
            continue
        for held in todo:
            for i in held[: setting.places]:
                generated.setdefault(i, 0)
        seen: list[tuple[int, int]] = [(i, r) for r, held in enumerate(todo) for i in held]
        index = np.array([i for i, _ in seen])
        runs = np.array([i in generated for i, _ in seen])
        tokens = np.array([generated.get(i, 0) for i, _ in seen])
        kv_tokens = np.where(runs, tokens + responses.prompt_tokens[index], 0)
        snapshot = Snapshot(
            index=index,
            rank=np.array([r for _, r in seen]),
            running=runs,
            generated=tokens,
            kv_tokens=kv_tokens,
            finished=np.array(finished, dtype=np.int64),
            moved=np.zeros(index.size, dtype=np.int64),
            responses=responses,
        )
        leaving, to = policy(snapshot, setting)
        sent, got = np.zeros(setting.num_ranks), np.zeros(setting.num_ranks)
        for at, target in zip(leaving.tolist(), to.tolist(), strict=True):
            i, source = seen[int(at)]
            todo[source].remove(i)
            todo[target].append(i)
            sent[source] += kv_tokens[at]
            got[target] += kv_tokens[at]
        if leaving.size:
            moves += leaving.size
            cost = setting.transfer
            seconds += cost.latency_s + max(sent.max(), got.max()) * cost.kv_s_per_token
            seconds += got.max() * cost.prefill_s_per_token
    return seconds, moves


@pytest.mark.parametrize("policy", [None, recipe, Ours(hysteresis=0.0, kv_price=0.0)], ids=["none", "recipe", "ours"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("slots", [None, 5])
def test_equals_a_loop_over_steps(policy: Policy | None, slots: int | None, recompute: bool) -> None:
    setting = Setting(num_ranks=4, requests_per_rank=16, slots=slots, check_interval=37, recompute=recompute)
    responses = LAW.draw(64, seed=3)
    rank = side_by_side(responses, setting)
    outcome = simulate(responses, rank, setting, policy)
    seconds, moves = step_by_step(responses, rank, setting, policy)
    assert outcome.seconds == pytest.approx(seconds, rel=1e-9)
    assert outcome.moves == moves
    assert policy is None or moves > 0
    assert outcome.kv_bytes == 0 if recompute else outcome.kv_bytes >= 0


def test_one_decode_shape_pays_the_largest_tier_at_every_step() -> None:
    setting = Setting(num_ranks=4, requests_per_rank=16)
    responses = LAW.draw(64, seed=0)
    outcome = simulate(responses, side_by_side(responses, setting), setting, None, one_shape=True)
    assert set(outcome.tier.tolist()) == {64}
    assert outcome.tier.size == responses.length.max()
    assert 0 < outcome.idle_share < 1


def test_lengths_follow_their_law() -> None:
    law = LengthLaw()
    drawn = law.draw(16 * 4000, seed=0)
    assert np.median(drawn.length) == pytest.approx(law.median, rel=0.05)
    assert np.log(drawn.length).std() == pytest.approx(np.hypot(law.between, law.within), rel=0.05)
    assert np.log(drawn.length).reshape(-1, 16).std(axis=1, ddof=1).mean() == pytest.approx(law.within, rel=0.05)
    assert drawn.length.max() == law.longest
    assert (LengthLaw().draw(64, 1).length == LengthLaw().draw(64, 1).length).all()


def test_the_setting_agrees_with_what_the_recipe_measured() -> None:
    """6200 to 6482 s without, 2861 s with tiers alone, 2291 to 2300 s with moves: within 5 %."""
    setting, law = Setting(), LengthLaw()
    found = {"none": 0.0, "tiers": 0.0, "recipe": 0.0}
    for seed in range(4):
        responses = law.draw(8192, seed)
        rank = side_by_side(responses, setting)
        found["none"] += simulate(responses, rank, setting, None, one_shape=True).seconds / 4
        found["tiers"] += simulate(responses, rank, setting, None).seconds / 4
        found["recipe"] += simulate(responses, rank, setting, recipe).seconds / 4
    assert found["none"] == pytest.approx(6341, rel=0.05)
    assert found["tiers"] == pytest.approx(2861, rel=0.05)
    assert found["recipe"] == pytest.approx(2295, rel=0.05)


@pytest.fixture(scope="module", params=[10, 100, 1000, 5000])
def recipe_setting(request: pytest.FixtureRequest) -> Comparison:
    entered = [each for each in contestants(Ours()) if each.name != "recipe, siblings apart"]
    return compare(Setting(check_interval=request.param), LengthLaw(), entered, range(2))


@pytest.mark.slow
def test_ours_saves_62_percent_and_is_never_slower_than_not_moving(recipe_setting: Comparison) -> None:
    ours = recipe_setting.seconds("ours")
    assert (1 - ours / recipe_setting.seconds("no moves, one shape")).mean() >= 0.62
    assert (ours <= recipe_setting.seconds("no moves, siblings apart")).all()
    assert (recipe_setting.seconds("ours, planner only") <= recipe_setting.seconds("no moves, tiers")).all()


@pytest.mark.slow
def test_ours_needs_5_percent_less_time_than_the_recipe_or_half_its_bytes_in_the_same_time(
    recipe_setting: Comparison,
) -> None:
    time = recipe_setting.seconds("ours").mean() / recipe_setting.seconds("recipe").mean()
    sent = recipe_setting.kv_bytes("ours").mean() / recipe_setting.kv_bytes("recipe").mean()
    assert time <= 0.95 or (time <= 1.003 and sent <= 0.5)


@pytest.mark.slow
def test_no_policy_beats_the_bound(recipe_setting: Comparison) -> None:
    for name in recipe_setting.outcomes:
        assert (recipe_setting.seconds(name) >= recipe_setting.bound_s).all()


@pytest.mark.parametrize("slower", [30, 1000])
def test_moving_is_never_slower_where_moves_are_dear(slower: int) -> None:
    """What does not pay is not moved."""
    setting = Setting(num_ranks=16, requests_per_rank=32, check_interval=50, bytes_per_s=25e9 / slower)
    for seed in range(3):
        responses = LengthLaw(longest=4096).draw(512, seed)
        rank = side_by_side(responses, setting)
        still = simulate(responses, rank, setting, None).seconds
        ours = simulate(responses, rank, setting, Ours())
        assert ours.seconds <= still * (1 + 1e-9)
        assert slower == 30 or simulate(responses, rank, setting, recipe).seconds > still
        assert slower == 1000 or (ours.moves > 0 and ours.seconds < still * 0.9)


def test_more_requests_than_slots_finish_sooner_with_moves() -> None:
    setting = Setting(num_ranks=16, requests_per_rank=64, slots=16, check_interval=50)
    for seed in range(3):
        responses = LengthLaw(longest=4096).draw(1024, seed)
        for place in (side_by_side, siblings_apart):
            rank = place(responses, setting)
            moving = simulate(responses, rank, setting, Ours())
            assert moving.seconds < simulate(responses, rank, setting, None).seconds


def test_the_bound_is_not_told_where_requests_wait() -> None:
    assert np.isnan(bound_seconds(LAW.draw(64, 0), Setting(num_ranks=4, requests_per_rank=16, slots=8)))


def test_the_command_prints_a_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "rollout.png"
    assert main(["rollout-sim", "--quick", "--seeds", "1", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for text in ("16 ranks × 32 requests", "recipe", "ours, planner only", "KV GB", "bound"):
        assert text in shown
    assert "Seeds in which moving was slower than not moving: 0 of 2." in shown
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["rollout-sim", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for option in (
        "--ranks",
        "--requests",
        "--seeds",
        "--check-interval",
        "--median",
        "--recompute",
        "--out",
        "examples:",
    ):
        assert option in shown


def test_the_command_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout-sim", "--requests", "65"]) == 2
    assert "slots must fit the largest tier, got 65" in capsys.readouterr().err
    assert main(["rollout-sim", "--between", "-1"]) == 2
    assert "between must be from 0 to 10, got -1.0" in capsys.readouterr().err


def test_the_command_is_listed_and_imports_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "rollout-sim" in capsys.readouterr().out
    assert eq.__version__
