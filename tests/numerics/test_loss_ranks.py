"""Two real ranks over gloo: one denominator, one loss, one set of logged numbers."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics import loss_ranks
from tests.numerics.loss_plain import Plain, Settings, plain_step
from tests.numerics.loss_rig import distance, make_rows, make_table


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=loss_ranks.run, args=(rank, str(folder))) for rank in range(loss_ranks.WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [_load(folder / f"{rank}.pt") for rank in range(loss_ranks.WORLD)]


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(("name", "mode"), loss_ranks.PAIRS)
def test_two_ranks_get_the_loss_of_one(results: list[dict[str, Any]], name: str, mode: str) -> None:
    want = plain_step(make_rows(loss_ranks.ROWS), make_table(), name, mode, Settings())
    for rank in results:
        loss, gradient, metrics = rank["steps"][name]
        assert distance(Plain(loss=loss, gradient=gradient, metrics=metrics), want) < 1e-12


def test_a_difference_in_names_or_kinds_is_an_error_on_every_rank(results: list[dict[str, Any]]) -> None:
    assert results[0]["errors"] == results[1]["errors"]
    names, kinds, value = results[0]["errors"]
    assert "metrics" in names
    assert "('b', 'Metric')" in names
    assert "MaxMetric" in kinds
    assert "rank 0" in value
    assert "'a'" in value
    assert "float 3.0" in value


def test_each_kind_is_reduced_as_its_kind(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["kinds"] == {"high": -5.0, "low": 2.0, "mean": 100 / 11, "none": 0.0}


def test_forty_metrics_take_one_all_reduce_a_kind(results: list[dict[str, Any]]) -> None:
    """The sums and counts, then the largest and smallest."""
    for rank in results:
        assert rank["calls"] == [40, 20]
