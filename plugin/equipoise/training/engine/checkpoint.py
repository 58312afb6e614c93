"""Checkpoints that survive a killed process.

A checkpoint is written to a hidden folder, flushed to disk, read back and renamed; only then does the file ``latest``
change, also by a rename. Until then, ``latest`` names the previous checkpoint, which is removed last. The format is
that of ``torch.distributed.checkpoint``, so any engine loads it on any number of ranks. It contains pickles (metadata
and non-tensors), so load only checkpoints that you trust; ``extra`` is read without running code.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed.checkpoint lists its names nowhere.

from __future__ import annotations

import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from equipoise._checks import is_whole
from equipoise.errors import EquipoiseError, InvalidInput, must
from equipoise.together import RankFailed, gather_numbers, together

LATEST = "latest"
"""Name of the file that points to the last complete checkpoint."""
_EXTRA = "extra.pt"
_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype)
_NESTED = (list, tuple, set, dict, OrderedDict)


class CheckpointError(EquipoiseError, RuntimeError):
    """A checkpoint could not be written or read; earlier ones are unchanged."""


def save(
    folder: str | Path,
    state: Callable[[], dict[str, Any]],
    *,
    step: int,
    counters: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save the state of all ranks as ``folder/step_<step>`` and point ``latest`` at it.

    Args:
        folder: on a disk that all ranks see.
        state: returns nested tensors and plain values; sharded tensors are saved shard by shard.
        step: number in the name; saving a step again gets a new name.
        counters: the engine's own plain values.
        extra: rank 0's plain values and tensors, nested in lists, tuples, sets and dictionaries.
        keep: how many of the newest checkpoints to keep; None for all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: a rank could not write; raised on every rank.
        InvalidInput: ``step`` or ``keep`` breaks its rule, or ``extra`` has values that could not be loaded again.
    """
    root = Path(folder)
    draft = root / f".draft_step_{step:08d}" if is_whole(step) else root

    def prepare() -> dict[str, Any]:
        if not is_whole(step):
            raise InvalidInput(must("global_step", "be a whole number of at least 0", step, "pass the steps done"))
        if keep is not None and not is_whole(keep, 1):
            raise InvalidInput(must("max_ckpt_to_keep", "be at least 1", keep, "use None to keep all"))
        if _is_first():
            caller = dict(extra or {})
            _check_loadable("extra", caller)
            root.mkdir(parents=True, exist_ok=True)
            for left in root.glob(".draft_*"):  # of a save that was killed
                shutil.rmtree(left)
            draft.mkdir()
            with (draft / _EXTRA).open("wb") as file:
                torch.save({"engine": dict(counters), "caller": caller}, file)
                _flush(file.fileno())
            read_extra(draft)
        return state()

    found = _voted(prepare, doing=f"starting a checkpoint in {root}")
    # torch raises a rank's write error on all ranks, as one kind of error.
    try:
        dcp.save(found, storage_writer=dcp.FileSystemWriter(draft, sync_files=True))
    except dcp.CheckpointException as error:
        raise CheckpointError(f"a rank could not write the checkpoint {draft}: {error}") from error
    _voted(
        lambda: _publish(root, draft, step, keep) if _is_first() else None, doing=f"publishing a checkpoint in {root}"
    )
    return _latest(root)


def _publish(root: Path, draft: Path, step: int, keep: int | None) -> None:
    """Rename a complete draft, point ``latest`` at it, and remove old checkpoints."""
    _flush_folder(draft)
    dcp.FileSystemReader(draft).read_metadata()
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


def find(folder: str | Path, step: int | None = None) -> Path:
    """The folder that ``latest`` names, or the newest one of ``step``.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(folder)
    there = [path.name for path in _complete(root)]
    if step is None:
        found = _latest(root)
        if found.name not in there:
            raise CheckpointError(f"{root / LATEST} names {found.name!r}, which does not exist; there are: {there}")
        return found
    named = [path for path in _complete(root) if _key(path)[0] == step]
    if not named:
        raise CheckpointError(f"{root} has no complete checkpoint of step {step}; there are: {there}")
    return named[-1]


def load(
    folder: str | Path,
    step: int | None,
    *,
    state: Callable[[dict[str, Any]], dict[str, Any]],
    use: Callable[[dict[str, Any], dict[str, Any]], None],
) -> dict[str, Any]:
    """Load a checkpoint on all ranks: the latest, or the newest of ``step``.

    Args:
        folder: as passed to :func:`save`.
        step: step of the checkpoint; None for the latest.
        state: returns the state to fill, given the counters.
        use: receives the filled state and the counters.

    Returns:
        ``extra`` as saved.

    Raises:
        CheckpointError: there is none, ranks see different ones, or it lacks a part of the state; raised on all ranks.
    """
    found: list[tuple[Path, dict[str, Any], dict[str, Any]]] = []

    def look() -> tuple[int, int]:
        path = find(folder, step)
        extra = read_extra(path)
        found.append((path, extra, state(extra["engine"])))
        return _key(path)

    keys = gather_numbers(look, count=2, group=_world(), doing=f"looking for a checkpoint in {folder}")
    if any(key != keys[0] for key in keys):
        raise CheckpointError(f"ranks find different checkpoints in {folder}: steps {keys}; is the disk shared?")
    path, extra, filled = found[0]
    try:
        dcp.load(filled, storage_reader=dcp.FileSystemReader(path))
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{path} does not hold this engine's state: {error}") from error
    _voted(lambda: use(filled, extra["engine"]), doing=f"loading {path}")
    return extra["caller"]


def read_extra(path: Path) -> dict[str, dict[str, Any]]:
    """The counters ("engine") and what the caller saved ("caller") in a checkpoint's folder."""
    return torch.load(path / _EXTRA, weights_only=True)


def _check_loadable(field: str, value: object) -> None:
    """Raise unless ``value`` consists of exactly the types that ``torch.load`` reads without running code.

    Raises:
        InvalidInput: names the place in ``extra``.
    """
    if type(value) not in (*_PLAIN, *_NESTED) or value == b"":  # Python pickles empty bytes as a call
        rule = "contain plain values, tensors, and lists, tuples, sets and dictionaries of them"
        remedy = "a numpy array as a tensor, a path as a str, other objects as plain values"
        raise InvalidInput(must(field, rule, f"{type(value).__name__} {value!r}"[:80], f"convert it ({remedy})"))
    if isinstance(value, dict):
        for key, inner in cast("dict[object, object]", value).items():
            _check_loadable(f"key of {field}", key)
            _check_loadable(f"{field}[{key!r}]", inner)
    elif isinstance(value, (list, tuple, set)) and not isinstance(value, torch.Size):
        for i, inner in enumerate(cast("list[object]", value)):
            _check_loadable(f"{field}[{i}]", inner)


def _voted(part: Callable[[], Any], *, doing: str) -> Any:
    try:
        return together(part, group=_world(), doing=doing)
    except (OSError, RankFailed) as error:  # the first where there is one rank
        raise CheckpointError(f"{doing} failed: {error}" if isinstance(error, OSError) else str(error)) from error


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _latest(root: Path) -> Path:
    pointer = root / LATEST
    if not pointer.is_file():
        there = [path.name for path in _complete(root)]
        raise CheckpointError(f"{root} has no file {LATEST!r} that names a complete checkpoint; there are: {there}")
    return root / pointer.read_text()


def _complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first; folders with other names are ignored."""
    return sorted((path for path in root.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()), key=_key)


def _key(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _free_name(root: Path, step: int) -> Path:
    """A save never replaces a folder: between removing the old one and renaming the new one, there would be none."""
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
