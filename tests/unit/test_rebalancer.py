"""``RolloutRebalancer`` on a group of one rank: what it counts, and what it leaves after an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import equipoise as eq
from equipoise.rollout.transfer import RequestState, StepReport
from equipoise.rollout.transfer.rebalancer import Check, RolloutRebalancer
from tests.toy_engine import TIERS, ToyEngine, answer, request


@pytest.fixture(autouse=True, scope="module")
def lone_rank() -> Iterator[None]:
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rebalancer(engine: Any, **settings: Any) -> RolloutRebalancer:
    settings = {"check_interval": 3, "tiers": TIERS, "timeout_s": 20.0} | settings
    return RolloutRebalancer(engine, None, eq.RebalancerConfig(**settings))


def asked() -> list[RequestState]:
    return [request(name, number, seed=seed) for seed, (name, number) in enumerate((("a", 9), ("b", 2), ("c", 13)))]


def test_results_come_in_the_order_asked_for() -> None:
    runner = rebalancer(ToyEngine())
    for order in (1, -1):
        done = runner.generate(asked()[::order])
        assert [(state.id, state.output) for state in done] == [(each.id, answer(each)) for each in asked()[::order]]
    assert runner.unfinished == []


def test_checks_and_steps_are_counted() -> None:
    runner, reports = rebalancer(ToyEngine(), profile_interval=4), list[StepReport]()
    runner.generate(asked(), on_step=reports.append)
    assert [check.step for check in runner.checks] == [0, 3, 6, 9, 12]
    assert [check.waiting for check in runner.checks] == [(3,), (0,), (0,), (0,), (0,)]
    assert [check.running for check in runner.checks] == [(0,), (2,), (2,), (1,), (1,)]
    assert [check.tier for check in runner.checks] == [4, 2, 2, 2, 2]
    assert all(0 <= check.waited_s < 5 for check in runner.checks)
    assert len(reports) == 13
    kept = [(report.tier, report.context_tokens, report.seconds) for report in reports[3::4]]
    assert list(runner.known.samples) == kept
    figures = runner.metrics()
    assert (figures["rollout/checks"], figures["rollout/moves"], figures["rollout/exchange_s"]) == (5, 0, 0)
    assert figures["rollout/tier_mean"] == figures["rollout/tier_unmoved_mean"] == 2.4
    assert figures["rollout/saved_measured_s"] == 0
    assert 0 < figures["rollout/idle_share"] < 1


def test_measured_savings_are_those_of_lower_tiers_less_the_exchanges() -> None:
    runner = rebalancer(ToyEngine())
    runner.known.samples.extend([(8, 90, 0.4), (8, 90, 0.5), (8, 90, 0.9), (4, 90, 0.2)])
    for tier, unmoved, seconds in ((4, 8, 0.125), (8, 8, 0.0), (2, 8, 0.25)):  # tier 2 was never measured
        seen: dict[str, Any] = {"step": 0, "running": (1,), "waiting": (0,), "kv_bytes": 0, "waited_s": 0.0}
        runner.checks.append(
            Check(tier=tier, tier_unmoved=unmoved, num_moved=1, predicted_s=0.5, seconds=seconds, **seen)
        )
    figures = runner.metrics("")
    assert figures["saved_measured_s"] == pytest.approx(3 * (0.5 - 0.2) - 0.375)
    assert (figures["saved_predicted_s"], figures["exchange_s"], figures["moves"]) == (1.5, 0.375, 3)
    assert figures["tier_mean"] == pytest.approx((4 + 8 + 2) / 3)


def test_nothing_is_measured_unless_asked_for() -> None:
    runner = rebalancer(ToyEngine(), profile=False)
    runner.generate(asked())
    assert not runner.known.samples


def test_lengths_of_a_rollout_are_expected_of_the_next() -> None:
    engine = ToyEngine()
    runner = rebalancer(engine)
    runner.generate(asked())
    engine.waiting = {name: request(name, 50, seed=seed) for seed, name in enumerate("abc")}
    (requests,) = runner.known.requests([runner.table()])
    assert [request.expected_remaining for request in requests] == [9, 2, 13]


def test_a_table_tells_how_many_tokens_may_still_come() -> None:
    engine = ToyEngine()
    engine.waiting = {"a": request("a", 9, seed=0)}
    engine.step()
    engine.step()
    (row,) = rebalancer(engine).table().rows
    assert (row.num_output, row.max_remaining) == (2, 7)


def test_tiers_must_be_those_of_the_engine() -> None:
    with pytest.raises(eq.InvalidInput, match=r"tiers.*8, 4, 2.*16"):
        rebalancer(ToyEngine(), tiers=(16,))


def test_what_is_done_when_a_step_fails_need_not_be_asked_for_again() -> None:
    engine: Any = ToyEngine()
    step, steps = engine.step, list[int]()

    def breaks() -> Any:
        steps.append(1)
        assert len(steps) != 6, "broken"
        return step()

    engine.step = breaks
    runner = rebalancer(engine)
    with pytest.raises(AssertionError, match="broken"):
        runner.generate(asked())
    assert engine.is_empty
    assert [state.id for state in runner.results] == ["b"]
    assert [state.id for state in runner.unfinished] == ["a", "c"]
    rest = runner.generate(runner.unfinished)
    assert [state.output for state in rest] == [answer(asked()[0]), answer(asked()[2])]


def test_an_engine_that_cannot_be_cleared_is_warned_of() -> None:
    engine: Any = ToyEngine()

    def fails() -> None:
        raise KeyError("no")

    engine.step = engine.clear = fails
    runner = rebalancer(engine)
    with pytest.warns(eq.EquipoiseWarning, match="KeyError"), pytest.raises(KeyError):
        runner.generate(asked())


def test_only_requests_are_taken() -> None:
    wrong: Any = ["a"]
    with pytest.raises(eq.InvalidInput, match=r"requests\[0\].*'a'"):
        rebalancer(ToyEngine()).generate(wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 2**63),
        ("top_k", 2**31),
        ("max_tokens", 2**31),
        ("max_tokens", 0),
        ("top_p", 0.0),
        ("temperature", -1.0),
    ],
)
def test_sampling_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(eq.InvalidInput, match=f"{field}.*{value}"):
        eq.Sampling(**{field: value})


def test_sampling_changes_nothing_unless_asked_for() -> None:
    plain = eq.Sampling(
        seed=0, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )
    assert eq.Sampling() == plain
    assert eq.Sampling().max_tokens == 16
