"""Checkpoints that a killed process cannot harm.

A save goes to a hidden folder, is flushed to disk and renamed; only then does the file ``latest`` change, by a rename
too. Until that, ``latest`` names the one before, which is removed last. The format is that of
``torch.distributed.checkpoint``: any engine and any number of ranks loads what another saved.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed.checkpoint lists its names nowhere.

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from equipoise.errors import EquipoiseError, InvalidInput, must

LATEST = "latest"
"""File that names the folder of the last complete checkpoint."""
_EXTRA = "extra.pt"


class CheckpointError(EquipoiseError, RuntimeError):
    """A checkpoint could not be written or read; earlier ones are as they were."""


def save(
    folder: str | Path,
    state: dict[str, Any],
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save ``state`` of all ranks as ``folder/step_<step>`` and point ``latest`` at it.

    Args:
        folder: on a disk that all ranks see.
        state: tensors and plain values, nested; sharded tensors are saved shard by shard.
        step: number in the name; a second save of one step gets a name of its own.
        extra: plain values and tensors of rank 0.
        keep: how many of the newest checkpoints stay; None for all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on every rank, whichever could not write.
        InvalidInput: ``step`` or ``keep`` breaks its rule.
    """
    if step < 0:
        raise InvalidInput(must("global_step", "be at least 0", step, "pass the optimizer steps done"))
    if keep is not None and keep < 1:
        raise InvalidInput(must("max_ckpt_to_keep", "be at least 1", keep, "use None to keep all"))
    root = Path(folder)
    draft = root / f".draft_step_{step:08d}"

    def prepare() -> None:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".draft_*"):  # of a save that was killed
            shutil.rmtree(left)
        draft.mkdir()
        with (draft / _EXTRA).open("wb") as file:
            torch.save(dict(extra or {}), file)
            _flush(file.fileno())

    def publish() -> None:
        _flush_folder(draft)
        final = _free_name(root, step)
        draft.rename(final)
        _flush_folder(root)
        pointer = root / f".{LATEST}"
        with pointer.open("w") as file:
            file.write(final.name)
            file.flush()
            _flush(file.fileno())
        pointer.replace(root / LATEST)
        _flush_folder(root)
        for old in _complete(root)[: -keep if keep is not None else 0]:
            if old.name != final.name:
                shutil.rmtree(old)

    _on_first_rank(prepare)
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(draft, sync_files=True))
    except dcp.CheckpointException as error:
        raise CheckpointError(must("checkpoint", "be writable on every rank", str(error), "see to the disk")) from error
    _on_first_rank(publish)
    return root / (root / LATEST).read_text()


def find(folder: str | Path, step: int | None = None) -> Path:
    """The folder that ``latest`` names, or the newest one of ``step``.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(folder)
    if step is None:
        pointer = root / LATEST
        found = root / pointer.read_text() if pointer.is_file() else None
    else:
        named = [path for path in _complete(root) if _key(path)[0] == step]
        found = named[-1] if named else None
    if found is None or not found.is_dir():
        there = [path.name for path in _complete(root)]
        rule = "hold a complete checkpoint" + ("" if step is None else f" of step {step}")
        raise CheckpointError(must(str(root), rule, there, "pass the folder that save_checkpoint was given"))
    return found


def read_extra(path: Path) -> dict[str, Any]:
    """What was saved as ``extra`` in a checkpoint's folder."""
    return torch.load(path / _EXTRA, weights_only=True)


def load(path: Path, state: dict[str, Any]) -> None:
    """Fill ``state`` in place from a checkpoint's folder.

    Raises:
        CheckpointError: the checkpoint lacks a part of ``state``.
    """
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    except dcp.CheckpointException as error:
        raise CheckpointError(must(str(path), "hold this engine's state", str(error), "load the same model")) from error


def _on_first_rank(action: Callable[[], None]) -> None:
    """Run on rank 0 while the others wait; what goes wrong there is raised on all."""
    problem: list[str | None] = [None]
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        try:
            action()
        except OSError as error:
            problem = [f"{type(error).__name__}: {error}"]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise CheckpointError(must("checkpoint folder", "be writable by rank 0", problem[0], "see to the disk"))


def _complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(root.glob("step_*"), key=_key)


def _key(path: Path) -> tuple[int, int]:
    step, _, again = path.name.removeprefix("step_").partition(".")
    return int(step), int(again or 0)


def _free_name(root: Path, step: int) -> Path:
    """A save never replaces a folder: between removing the old and renaming the new there would be neither."""
    again = [_key(path)[1] for path in _complete(root) if _key(path)[0] == step]
    return root / (f"step_{step:08d}" if not again else f"step_{step:08d}.{max(again) + 1}")


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)
