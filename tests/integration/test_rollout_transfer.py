"""Requests that move between two real ranks over gloo: the same tokens, the same order, one error for all."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.integration import gloo_ranks
from tests.integration import rollout_rig as rig

MOVING = ("kv", "recompute", "about", "tight")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    assert gloo_ranks.start(rig.run_two, 2, folder, preload=[rig.__name__]) == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("run", MOVING)
def test_moves_change_no_token_no_log_prob_and_no_order(ranks: list[dict[str, Any]], run: str) -> None:
    """Bit for bit: greedy, sampled, cut, penalised, stopped; with the cache, computed again, and with a full pool."""
    for rank, seen in enumerate(ranks):
        assert seen[run]["results"] == seen["still"]["results"]
        assert [result[0] for result in seen[run]["results"]] == [r.id for r in rig.requests(rank, rig.LENGTHS[rank])]
        assert seen[run]["metrics"]["rollout/moves"] > 0
        assert seen[run]["metrics"]["rollout/refusals"] == 0
        assert seen["still"]["metrics"]["rollout/moves"] == 0


def test_moves_that_must_pay_change_nothing_either(ranks: list[dict[str, Any]]) -> None:
    """Step times are real here, so whether any move pays is not known beforehand."""
    for seen in ranks:
        assert seen["timed"]["results"] == seen["still"]["results"]
        assert set(seen["timed"]["metrics"]) == set(seen["kv"]["metrics"])


def test_bfloat16_moves_change_nothing_either(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["bfloat16"]["results"] == seen["bfloat16 still"]["results"]
        assert seen["bfloat16"]["metrics"]["rollout/moves"] > 0


def test_one_rank_alone_gives_the_same(ranks: list[dict[str, Any]]) -> None:
    alone = rig.engine()
    for rank, seen in enumerate(ranks):
        done = alone.generate(rig.requests(rank, rig.LENGTHS[rank]))
        assert [(s.output, s.log_probs) for s in done] == [(r[1], r[2]) for r in seen["kv"]["results"]]


def test_an_idle_rank_gets_work_and_the_tier_falls(ranks: list[dict[str, Any]]) -> None:
    checks = ranks[0]["kv"]["checks"]
    assert any(min(running) > 0 and waiting == (0, 0) for _, running, waiting, *_ in checks[2:])
    assert sum(tier < unmoved for *_, tier, unmoved, _ in checks) > 2
    still = ranks[0]["still"]["checks"]
    assert len(checks) < len(still), "rank 0 has more requests than slots: the other rank's slots shorten the rollout"


def test_one_rebalancer_serves_rollout_after_rollout(ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks):
        first, moves, second, all_moves = seen["twice"]
        assert (first, second) == ((6, 1) if rank == 0 else (1, 6))
        assert 0 < moves < all_moves


def test_ranks_agree_on_every_check(ranks: list[dict[str, Any]]) -> None:
    for run in ("still", "timed", *MOVING):
        assert ranks[0][run]["checks"] == ranks[1][run]["checks"]


def test_caches_are_counted_and_given_back(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["kv"]["metrics"]["rollout/kv_bytes"] > 0
        assert seen["recompute"]["metrics"]["rollout/kv_bytes"] == 0
        assert 0 < seen["kv"]["metrics"]["rollout/idle_share"] < 1
        for run in ("still", *MOVING):
            assert seen[run]["free"] == seen[run]["blocks"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shape", "InvalidInput: cache layout of rank 1 "),
        ("weights", "InvalidInput: model of rank 1 "),
        ("settings", "InvalidInput: settings of rank 1 "),
        ("id", "InvalidInput: request id 'same' .*0 and 1"),
        ("long", "InvalidInput: rank 1: request 'q1.0' .*256"),
    ],
)
def test_bad_input_is_one_error_on_all_ranks_before_a_token(ranks: list[dict[str, Any]], case: str, words: str) -> None:
    (first, steps), (second, other) = (seen["bad"][case] for seen in ranks)
    assert re.match(words, first)
    assert first == second
    assert (steps, other) == (0, 0)


def test_a_rank_that_breaks_is_named_on_all(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert re.match("RankFailed: rank 1 .*RuntimeError: out of memory", seen["bad"]["breaks"][0])


def test_a_plan_that_cannot_be_carried_out_moves_nothing(ranks: list[dict[str, Any]]) -> None:
    first, second = (seen["room"] for seen in ranks)
    assert first["texts"] == second["texts"]
    wanted = (
        "rank 1 .*1 slots",
        "move of request 'nobody'",
        "move of request .*twice",
        "move of request .*2",
        ".*'mail'",
    )
    assert all(re.match(f"InvalidInput: {want}", text) for want, text in zip(wanted, first["texts"], strict=True))
    assert first["untouched"]
    assert second["untouched"]
    assert (first["moved"], first["now"], second["now"]) == (1, 7, 2)


@pytest.mark.parametrize(("method", "rank"), [("export", 0), ("reserve", 1)])
def test_a_rank_that_refuses_is_named_and_nothing_is_lost(ranks: list[dict[str, Any]], method: str, rank: int) -> None:
    for seen in ranks:
        assert seen[method]["results"] == seen["still"]["results"]
        assert all(f"rank {rank} " in text for text in seen[method]["refusals"])
        assert f"rank {rank} " in seen[method]["warned"][0]
        assert "out of memory" in seen[method]["warned"][0]
        assert seen[method]["free"] == 96
