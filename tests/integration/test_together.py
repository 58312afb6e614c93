"""Wherever ranks of the training room meet, one that fails is heard by all: no rank waits longer than one time-out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from equipoise import together
from tests.integration import together_rig, together_training
from tests.integration.together_rig import WORLDS, Seen

TABLE = together_training.meetings(planning=True)
TRAINING = Path(together.__file__).parent / "training"
VOTES = {
    "engine/agreement.py": 1,
    "engine/checkpoint.py": 2,
    "engine/ddp.py": 1,
    "engine/fsdp2.py": 1,
    "engine/passes.py": 2,
    "engine/torch_engine.py": 2,
    "loss/denominators.py": 1,
    "loss/metrics.py": 2,
}
"""Calls of the helper in the room, each with a row in ``together_training.meetings``."""
COLLECTIVES = {
    "engine/ddp.py": 1,
    "engine/fsdp2.py": 1,
    "engine/start.py": 1,
    "engine/ulysses.py": 2,
    "loss/metrics.py": 1,
}
"""Collectives beside it, where all ranks are known to go: gradients, weights, tokens of shared rows, agreed metrics."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[Seen]]]:
    return together_rig.run("tests.integration.together_training", tmp_path_factory.mktemp("together"))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(TABLE))
def test_a_rank_that_fails_is_heard_by_all(seen: dict[int, list[list[Seen]]], name: str, world: int) -> None:
    """Case P12 of the reported cases: an exception of any type, on any rank."""
    (failure,) = (each for each in zip(*seen[world], strict=True) if each[0].name == name)
    together_rig.check(list(failure), voted=TABLE[name].voted)


def calls(names: set[str]) -> dict[str, int]:
    """How often the sources of the room call functions of these names, by file."""
    found: dict[str, int] = {}
    for path in sorted(TRAINING.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in names:
                    where = str(path.relative_to(TRAINING))
                    found[where] = found.get(where, 0) + 1
    return found


def test_every_vote_and_every_collective_is_known() -> None:
    """One that is added needs a row in the table of meetings, and a number here."""
    assert calls({"together", "gather_numbers", "gather_texts"}) == VOTES
    tensors = {"all_reduce", "all_gather", "broadcast", "all_to_all_single", "all_to_all", "reduce_scatter", "barrier"}
    assert calls(tensors) == COLLECTIVES


def test_no_collective_of_the_room_pickles() -> None:
    """But for ``torch.distributed.checkpoint``, whose files are pickles anyway."""
    objects = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
    assert calls(objects | {"send_object_list", "recv_object_list"}) == {}
