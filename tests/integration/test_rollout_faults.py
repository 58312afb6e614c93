"""Whatever a rank raises, and wherever: one error or one refusal on all ranks, at once, and no request lost."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import gloo_ranks
from tests.integration import rollout_faults_rig as rig

Seen = list[tuple[dict[str, Any], ...]]
"""By scenario: what each rank saw."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks") / ("two" if request.param == 2 else "three")
    folder.mkdir()
    assert gloo_ranks.start(rig.run, request.param, folder, preload=[rig.__name__]) == [0] * request.param
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


@pytest.fixture(scope="module")
def played(ranks: list[dict[str, Any]]) -> Seen:
    return list(zip(*(seen["played"] for seen in ranks), strict=True))


def test_every_point_is_reached_on_some_rank(played: Seen) -> None:
    assert {seen["point"] for ranks in played for seen in ranks if seen["fired"]} == set(rig.POINTS)


def test_all_ranks_hear_of_the_failure_alike_and_none_waits(played: Seen) -> None:
    for ranks in played:
        first = ranks[0]
        assert len({seen["text"] for seen in ranks}) == 1, first["scenario"]
        assert len({tuple(seen["refusals"]) for seen in ranks}) == 1, first["scenario"]
        assert max(seen["seconds"] for seen in ranks) < rig.TIMEOUT_S / 2, first["scenario"]
        told = [first["text"], *first["refusals"]]
        if any(seen["fired"] for seen in ranks):
            assert any(f"rank {first['rank']}" in text and "injected" in text for text in told), first["scenario"]
        else:
            assert told == [""], first["scenario"]


def test_an_exchange_that_fails_is_given_up_and_any_other_failure_ends_the_rollout(
    played: Seen,
) -> None:
    given_up = {seen["point"] for ranks in played for seen in ranks if seen["refusals"]}
    ended = {seen["point"] for ranks in played for seen in ranks if seen["text"]}
    assert set(rig.REFUSED) <= given_up
    if len(played[0]) == 2:  # three ranks fail at fewer calls
        assert ended >= set(rig.POINTS) - {"export", "write", "read a layer"}
    for ranks in played:
        for seen in ranks:
            assert len([text for text in seen["warned"] if "nothing moved" in text]) == len(seen["refusals"])


def test_nothing_is_left_behind_lost_or_decoded_twice(played: Seen) -> None:
    for ranks in played:
        for seen in ranks:
            assert seen["right"], seen["scenario"]
            assert seen["empty"], seen["scenario"]
            assert seen["twice"] == [], seen["scenario"]


def test_ranks_that_plan_differently_all_hear_of_it(ranks: list[dict[str, Any]]) -> None:
    assert len({seen["disagree"]["text"] for seen in ranks}) == 1
    for rank, seen in enumerate(ranks):
        assert seen["disagree"]["seconds"] < rig.TIMEOUT_S / 2
        assert (seen["disagree"]["empty"], seen["disagree"]["left"]) == (True, len(rig.asked(rank)))


@pytest.mark.parametrize(("how", "code"), [("killed", -signal.SIGKILL), ("hangs", 0)])
def test_a_rank_that_is_lost_is_named_within_the_time_out(how: str, code: int, tmp_path: Path) -> None:
    folder = tmp_path / how
    folder.mkdir()
    assert gloo_ranks.start(rig.run_lost, 3, folder, preload=[rig.__name__]) == [0, code, 0]
    for rank in (0, 2):
        seen = torch.load(folder / f"{rank}.pt", weights_only=True)
        assert seen["ranks"] == (1,)
        assert re.search(f"rank 1 of 3 .*{rig.SHORT_S:g} s while sending requests", seen["text"])
        assert seen["seconds"] < rig.SHORT_S + 2
        assert seen["unfinished"] == [f"{rank}/0"]
        assert seen["empty"]
        assert seen["again"] == (), "the group is of no use any more"
