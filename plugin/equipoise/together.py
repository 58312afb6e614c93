"""The one way in which ranks act together: each runs its part, all learn how it went, and all raise the same error.

A rank that raises alone leaves the others waiting in their next collective. So what may fail on one rank runs inside
:func:`together` or :func:`gather_numbers`: the rank catches whatever its part raises, votes in one small collective,
and every rank raises the error of the first rank that failed. A part must not itself run collectives of the group,
unless a failure inside them reaches all ranks anyway, as a time-out does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from equipoise.errors import EquipoiseError

T = TypeVar("T")
_TEXT_BYTES = 4096


class RankFailed(EquipoiseError, RuntimeError):
    """What one rank was doing failed; raised on every rank with the same text."""


def together(part: Callable[[], T], *, group: Any, doing: str) -> T:
    """Run this rank's part, and raise on all ranks if it fails on any; a collective call.

    Costs one all-gather of one integer a rank where all goes well.

    Args:
        part: what this rank does; may raise anything.
        group: process group of the ranks; None for this process alone.
        doing: what is being done, for the text of the error: "writing a checkpoint".

    Returns:
        What ``part`` returned on this rank.

    Raises:
        EquipoiseError: a rank's part raised one; the same class on all ranks.
        RankFailed: a rank's part raised another exception.

    >>> together(lambda: 3, group=None, doing="counting")
    3
    """
    results: list[T] = []

    def run() -> tuple[int, ...]:
        results.append(part())
        return ()

    gather_numbers(run, count=0, group=group, doing=doing)
    return results[0]


def gather_numbers(part: Callable[[], Sequence[int]], *, count: int, group: Any, doing: str) -> list[list[int]]:
    """Like :func:`together` for a part whose result all ranks need: ``count`` integers of each, in the same collective.

    Returns:
        The numbers of every rank, by rank in ``group``.

    >>> gather_numbers(lambda: (7, 8), count=2, group=None, doing="counting")
    [[7, 8]]
    """
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [list(part())]
    failure: Exception | None = None
    numbers: Sequence[int] = (0,) * count
    try:
        numbers = part()
    except Exception as error:  # noqa: BLE001 - the one place that does: whatever it is, the other ranks must hear of it
        failure = error
    digest = 0 if failure is None else 1 + zlib.crc32(_described(failure))
    device = device_of(group)
    mine = torch.tensor([digest, *numbers], dtype=torch.int64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    table = [cast("list[int]", row.tolist()) for row in everyones]
    failed = [rank for rank, row in enumerate(table) if row[0]]
    if not failed:
        return [row[1:] for row in table]
    if failure is not None and len(failed) == len(table) and all(row[0] == digest for row in table):
        raise failure  # the same on all ranks already
    raise _first_failure(failed[0], failure, group, device, doing) from failure


@dataclass(frozen=True, kw_only=True)
class Attempt(Generic[T]):
    """How a part went that this rank ran ahead of its vote."""

    result: T | None = None
    failure: Exception | None = None

    def get(self) -> T:
        """The result; raises what the part raised."""
        if self.failure is not None:
            raise self.failure
        return cast("T", self.result)


def attempt(part: Callable[[], T]) -> Attempt[T]:
    """Run this rank's part now and vote later, where a collective comes anyway: call :meth:`Attempt.get` in its part.

    >>> attempt(lambda: 3).get(), type(attempt(lambda: 1 / 0).failure).__name__
    (3, 'ZeroDivisionError')
    """
    try:
        return Attempt(result=part())
    except Exception as error:  # noqa: BLE001 - see above; it is raised in the vote
        return Attempt(failure=error)


def device_of(group: Any) -> torch.device:
    """Where tensors must be for a collective of ``group``: the CPU if it knows gloo, else this rank's accelerator."""
    if "gloo" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _first_failure(rank: int, mine: Exception | None, group: Any, device: torch.device, doing: str) -> EquipoiseError:
    """The error of the first rank that failed, as every rank raises it."""
    message = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    if dist.get_rank(group) == rank and mine is not None:
        raw = _described(mine)[:_TEXT_BYTES]
        message[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    message = message.to(device)
    dist.broadcast(message, src=dist.get_global_rank(group, rank), group=group)
    name, _, text = message.cpu().numpy().tobytes().rstrip(b"\0").decode(errors="replace").partition("\n")
    known = _raisable(EquipoiseError).get(name)
    if known is not None:
        return known(f"rank {rank}: {text}")
    return RankFailed(f"rank {rank} failed while {doing}: {name}: {text}")


def _described(error: Exception) -> bytes:
    return f"{type(error).__name__}\n{error}".encode(errors="replace")


def _raisable(root: type[EquipoiseError]) -> dict[str, type[EquipoiseError]]:
    """Error classes by name that are made from a text alone."""
    found = {} if "__init__" in vars(root) else {root.__name__: root}
    for child in root.__subclasses__():
        found |= _raisable(child)
    return found
