"""Checkpoints of one process: what can be saved is read back, what cannot is refused, other folders are left alone."""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import enum
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import equipoise as eq
from equipoise.training.engine import checkpoint
from equipoise.training.engine.checkpoint import CheckpointError
from equipoise.training.engine.device import ensure_process_group


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    ensure_process_group("cpu")
    yield
    dist.destroy_process_group()


def save(root: Path, extra: Any = None, *, step: Any = 1, keep: Any = None) -> Path:
    state = {"weight": torch.full((2, 3), float(step))}
    return checkpoint.save(root, lambda: state, step=step, counters={"seen": 3}, extra=extra, keep=keep)


def load(root: Path, step: int | None = None) -> tuple[dict[str, Any], torch.Tensor]:
    state = {"weight": torch.zeros(2, 3)}
    seen: list[dict[str, Any]] = []
    extra = checkpoint.load(root, step, state=lambda counters: state, use=lambda _, counters: seen.append(counters))
    assert seen == [{"seen": 3}]
    return extra, state["weight"]


KINDS: dict[str, Any] = {
    "none": None,
    "truth": True,
    "whole": -(2**70),
    "real": 1e-300,
    "infinite": float("inf"),
    "complex": 1 + 2j,
    "text": "é\0\n",
    "bytes": b"\x00\xff",
    "list": [1, [2.0, "x"]],
    "tuple": (1, (), [None]),
    "set": {1, "a"},
    "map": {1: "a", "b": {"c": [True]}, (1, 2): b"x"},
    "ordered": OrderedDict(a=1, b=2),
    "size": torch.Size([2, 3]),
    "type": torch.bfloat16,
}
TENSORS: dict[str, torch.Tensor] = {
    "random state": torch.get_rng_state(),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "truth": torch.tensor([True, False]),
    "empty": torch.zeros(0, 4),
    "view": torch.arange(6).reshape(2, 3).t(),
    "gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_value_is_read_back_as_it_was(tmp_path: Path, kind: str) -> None:
    save(tmp_path, {kind: KINDS[kind]})
    found = load(tmp_path)[0][kind]
    assert (type(found), found) == (type(KINDS[kind]), KINDS[kind])


@pytest.mark.parametrize("kind", list(TENSORS))
def test_a_tensor_is_read_back_as_it_was(tmp_path: Path, kind: str) -> None:
    save(tmp_path, {"nested": [TENSORS[kind]]})
    found = load(tmp_path)[0]["nested"][0]
    assert torch.equal(found, TENSORS[kind])
    assert (found.dtype, found.shape) == (TENSORS[kind].dtype, TENSORS[kind].shape)


class Colour(enum.IntEnum):
    RED = 1


class Named(tuple[int, ...]):
    pass


REFUSED: dict[str, Any] = {
    "a function": lambda: 0,
    "a path": Path("x"),
    "numpy's random state": np.random.default_rng(0).bit_generator.state["state"] | {"array": np.zeros(2)},
    "an old random state": np.random.RandomState(0).get_state(),
    "a number of numpy": np.float64(1),
    "an enum": Colour.RED,
    "a kind of tuple": Named((1,)),
    "an object": object(),
    "empty bytes": b"",
    "a generator": torch.Generator(),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path, kind: str) -> None:
    save(tmp_path, {"fine": 1})
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(eq.InvalidInput, match=r"extra\['a'\]\[0\]"):
        save(tmp_path, {"a": [REFUSED[kind]]}, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert load(tmp_path)[0] == {"fine": 1}


def test_keys_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(eq.InvalidInput, match=r"key of extra.*Path"):
        save(tmp_path, {Path("x"): 1})


def test_what_was_written_is_read_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the check of types lets through."""
    monkeypatch.setattr(checkpoint, "_check_loadable", lambda field, value: None)  # pyright: ignore[reportUnknownLambdaType]
    save(tmp_path, {"fine": 1})
    with pytest.raises(pickle.UnpicklingError, match=r"[Pp]ath"):
        save(tmp_path, {"a": Path("x")}, step=2)
    assert load(tmp_path)[0] == {"fine": 1}


def test_all_that_was_written_is_flushed_to_disk_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.fstat(descriptor).st_ino))  # pyright: ignore[reportUnknownLambdaType]
    written: list[Path] = []
    rename = Path.rename

    def publish(draft: Path, final: Path) -> Path:
        if draft.is_dir():
            written.extend([draft, *draft.iterdir()])
            assert flushed.issuperset(path.stat().st_ino for path in written)
        return rename(draft, final)

    monkeypatch.setattr(Path, "rename", publish)
    save(tmp_path, {"fine": 1})
    assert len(written) >= 4, "folder, weights, their index, extra"
    assert flushed.issuperset(path.stat().st_ino for path in (tmp_path, tmp_path / "latest"))


def test_folders_that_are_not_checkpoints_are_ignored(tmp_path: Path) -> None:
    """Case P13 of the reported cases: `step_00000010_backup` beside the checkpoints."""
    others = ["step_00000010_backup", "step_latest", "step_7", "step_00000009.old", "step_"]
    for name in others:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step_00000012").write_text("a file")
    for step in (1, 2, 3):
        save(tmp_path, {"step": step}, step=step, keep=2)
    extra, weight = load(tmp_path)
    assert (extra, weight.unique().tolist()) == ({"step": 3}, [3.0])
    assert load(tmp_path, 2)[0] == {"step": 2}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, "step_00000002", "step_00000003", "step_00000012", "latest"}
    with pytest.raises(CheckpointError, match=r"step 10.*'step_00000002', 'step_00000003'"):
        load(tmp_path, 10)


def test_a_pointer_to_a_folder_that_is_gone_is_said_so(tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path, step=2).rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"latest.*'step_00000002'.*'step_00000001'"):
        load(tmp_path)
    assert load(tmp_path, 1)[1].unique().tolist() == [1.0]
    (tmp_path / "latest").write_text("../elsewhere")
    (tmp_path.parent / "elsewhere").mkdir()
    with pytest.raises(CheckpointError, match=r"'elsewhere'|elsewhere"):
        load(tmp_path)


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path)


def test_the_second_save_of_a_step_is_the_one_that_is_found(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path, {"number": number}, step=5)
    assert load(tmp_path, 5)[0] == load(tmp_path)[0] == {"number": 2}


def test_the_folder_of_checkpoints_is_made(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "first", {"fine": 1})
    assert load(tmp_path / "runs" / "first")[0] == {"fine": 1}


def test_a_folder_that_cannot_be_written_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file")


@pytest.mark.parametrize(("name", "bad"), [("global_step", -1), ("global_step", 1.5), ("max_ckpt_to_keep", 0)])
def test_settings_of_a_save_are_checked(tmp_path: Path, name: str, bad: Any) -> None:
    settings: dict[str, Any] = {"step": bad} if name == "global_step" else {"step": 1, "keep": bad}
    with pytest.raises(eq.InvalidInput, match=rf"{name}.*got {bad}"):
        checkpoint.save(tmp_path, dict, counters={}, **settings)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(CheckpointError, match="step_00000001"):
        checkpoint.load(tmp_path, None, state=lambda _: {"other": torch.zeros(1)}, use=lambda state, counters: None)
