"""A real TransferQueue: padding rows come out of it as an engine needs them. The rest is in test_verl_driver.py."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.family import run_patiently
from tests.unit.verl_driver import LENGTHS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("driver") / "out.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.driver_rig", str(out)]
    env = {**os.environ, "VERL_PLATFORM": "cpu", "TQ_NUM_THREADS": "2", "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    run_patiently(command, cwd=ROOT, env=env)
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", ["text", "media"])
def test_padding_rows_come_out_of_the_queue_among_real_ones(rig: dict[str, Any], kind: str) -> None:
    found = rig[kind]
    assert Counter(found["lengths"]) == Counter([*LENGTHS, 2, 2])
    assert found["sent"][0]["keys"] == found["keys"]
    assert len(found["padding"]) == 2
    for row in found["padding"]:
        assert sorted(row) == found["columns"]
        assert row["input_ids"] == [[2], 2.0]
        assert row["attention_mask"] == [[2], 1.0]
        assert (row["prompts"], row["responses"]) == ([[1], 2.0], [[1], 2.0])
        for name in ("response_mask", "loss_mask", "rm_scores", "rollout_log_probs"):
            assert row[name] == [[1], 0.0], name
        assert row["num_turns"] == 0
        assert found["uids"].count(row["uid"]) == 1


def test_padding_rows_have_side_data_of_their_own_length(rig: dict[str, Any]) -> None:
    for row in rig["media"]["padding"]:
        assert row["position_ids"] == [[4, 2], 1.0]
        assert row["routed_experts"] == [[2, 2, 3], 0.0]
        assert row["teacher_logprobs"] == [[2, 5], 0.0]
        assert (row["multi_modal_inputs"], row["raw_prompt"], row["data_source"], row["acc"]) == ({}, [], "", 0.0)
    assert all(row["position_ids"] == [[2], 1.0] for row in rig["text"]["padding"])
