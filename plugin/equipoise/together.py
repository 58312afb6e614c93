"""The one way for ranks to act together: each runs its part, all learn the outcome, and all raise the same error.

A rank that raises alone leaves the others waiting in their next collective. Code that may fail on one rank therefore
runs inside :func:`together` or :func:`gather_numbers`: the rank catches whatever its part raises, votes in one small
collective, and every rank raises the error of the first rank that failed. A part must not run collectives of the group
itself, unless a failure inside them reaches all ranks anyway, as a time-out does. If the work itself synchronizes ranks
(sharded weights, shared rows), a rank keeps its error in :class:`HeldBack` and continues until the next vote.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from equipoise.errors import EquipoiseError, InvalidInput, must

T = TypeVar("T")
_TEXT_BYTES = 4096
_VOTE_NUMBERS = 8
"""Votes of up to this many integers have the same size, so that a failed rank can join whichever vote comes next."""


class RankFailed(EquipoiseError, RuntimeError):
    """A rank failed at what it was doing; raised on every rank with the same text."""


def together(part: Callable[[], T], *, group: Any, doing: str) -> T:
    """Run this rank's part, and raise on all ranks if it fails on any; a collective call.

    Without failures it costs one all-gather of eight integers per rank.

    Args:
        part: the work of this rank; may raise anything.
        group: process group of the ranks; None for this process alone.
        doing: the activity, for the error text: "writing a checkpoint".

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
    """Like :func:`together`, and share ``count`` integers of each rank in the same collective.

    Args:
        part: the work of this rank; returns ``count`` 64-bit integers.
        count: the same on all ranks.
        group: process group of the ranks; None for this process alone.
        doing: as for :func:`together`.

    Returns:
        The numbers of every rank, by rank in ``group``.

    Raises:
        EquipoiseError: as for :func:`together`; InvalidInput if a part returns anything else.

    >>> gather_numbers(lambda: (7, 8), count=2, group=None, doing="counting")
    [[7, 8]]
    """
    if _is_alone(group):
        return [_numbers(part, count)]
    held = HeldBack()
    numbers = held.run(lambda: _numbers(part, count), instead=[0] * count)
    return _vote(held, numbers, group, doing)


def gather_texts(part: Callable[[], str], *, group: Any, doing: str) -> list[str]:
    """Like :func:`gather_numbers`, for one text of any length per rank, in two collectives.

    Returns:
        The texts of every rank, by rank in ``group``.

    >>> gather_texts(lambda: "é", group=None, doing="talking")
    ['é']
    """
    mine: list[bytes] = []

    def run() -> tuple[int, ...]:
        mine.append(part().encode())
        return (len(mine[0]),)

    sizes = [size for (size,) in gather_numbers(run, count=1, group=group, doing=doing)]
    if _is_alone(group):
        return [mine[0].decode()]
    width = max(1, *sizes)
    everyones = [torch.empty(width, dtype=torch.uint8, device=device_of(group)) for _ in sizes]
    dist.all_gather(everyones, _bytes(mine[0], width).to(device_of(group)), group=group)
    return [_raw(row)[:size].decode() for row, size in zip(everyones, sizes, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Attempt(Generic[T]):
    """The outcome of a part that ran ahead of its vote."""

    result: T | None = None
    failure: Exception | None = None

    def get(self) -> T:
        """The result of the part, or its error raised."""
        if self.failure is not None:
            raise self.failure
        return cast("T", self.result)


def attempt(part: Callable[[], T]) -> Attempt[T]:
    """Run this rank's part now and vote in a later collective: call :meth:`Attempt.get` in the part of that one.

    >>> attempt(lambda: 3).get(), type(attempt(lambda: 1 / 0).failure).__name__
    (3, 'ZeroDivisionError')
    """
    try:
        return Attempt(result=part())
    except Exception as error:  # noqa: BLE001 - the one place that does: whatever it is, the others must hear of it
        return Attempt(failure=error)


class HeldBack:
    """The first error of this rank, kept while it continues alongside the others until they vote.

    >>> held = HeldBack()
    >>> held.run(lambda: 1 // 0, instead=5), held.run(lambda: 7, instead=6)
    (5, 6)
    >>> type(held.error).__name__
    'ZeroDivisionError'
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, part: Callable[[], T], *, instead: T) -> T:
        """What ``part`` returns, or ``instead`` if it or an earlier part has failed."""
        if self.error is not None:
            return instead
        done = attempt(part)
        if done.failure is None:
            return done.get()
        if self.error is None:  # a part within this one may have failed first
            self.error = done.failure
        return instead

    def release(self) -> None:
        """Raise the error, if there is one; call it last in the part of a vote."""
        if self.error is not None:
            raise self.error


def device_of(group: Any) -> torch.device:
    """The device for collectives of ``group``: the CPU if it has gloo, else this rank's accelerator."""
    if "gloo" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _is_alone(group: Any) -> bool:
    return group is None or not dist.is_initialized() or dist.get_world_size(group) == 1


def _numbers(part: Callable[[], Sequence[int]], count: int) -> list[int]:
    numbers = [index(number) for number in part()]
    if len(numbers) != count or any(not -(2**63) <= number < 2**63 for number in numbers):
        raise InvalidInput(must("part", f"return {count} integers of 64 bits", numbers, "please file a bug"))
    return numbers


def _vote(held: HeldBack, numbers: list[int], group: Any, doing: str) -> list[list[int]]:
    """The numbers of every rank, or the error of the first rank that failed, raised."""
    try:
        table, error = _heard(held.error, numbers, group, doing)
    except RuntimeError:
        held.release()  # the group is broken, so nobody can be told: this rank's own error says more than "timed out"
        raise
    finally:
        held.error = None
    if error is None:
        return table
    try:
        raise error
    finally:
        del error  # it keeps the part's frames and their tensors alive


def _heard(
    mine: Exception | None, numbers: list[int], group: Any, doing: str
) -> tuple[list[list[int]], Exception | None]:
    """The numbers of every rank, and the error for this rank to raise."""
    digest = 0 if mine is None else 1 + zlib.crc32(_described(mine))
    filled = [digest, *numbers, *[0] * (_VOTE_NUMBERS - 1 - len(numbers))]
    row = torch.tensor(filled, dtype=torch.int64, device=device_of(group))
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    table = [cast("list[int]", each.tolist()) for each in rows]
    failed = [rank for rank, each in enumerate(table) if each[0]]
    if not failed:
        return [each[1 : 1 + len(numbers)] for each in table], None
    if all(each[0] == digest for each in table):
        return [], mine  # the same on all ranks already
    error = _first_failure(failed[0], mine, group, doing)
    error.__cause__ = mine
    return [], error


def _first_failure(rank: int, mine: Exception | None, group: Any, doing: str) -> EquipoiseError:
    """The error of the first rank that failed, as every rank raises it."""
    raw = _described(mine) if mine is not None and dist.get_rank(group) == rank else b""
    message = _bytes(raw, _TEXT_BYTES).to(device_of(group))
    dist.broadcast(message, src=dist.get_global_rank(group, rank), group=group)
    # a truncated text may end inside a character
    kind, _, text = _raw(message).rstrip(b"\0").decode(errors="ignore").partition("\n")
    name, _, known = kind.partition(" ")
    error = _classes().get(known)
    if error is not None:
        return error(f"rank {rank}: {text}")
    return RankFailed(f"rank {rank} failed while {doing}: {name}: {text}")


def _described(error: Exception) -> bytes:
    """Its class, the class that every rank can raise (none outside this package), and its text."""
    known = next((_path(each) for each in type(error).__mro__ if _path(each) in _classes()), "")
    try:
        text = str(error)
    except Exception as unsaid:  # noqa: BLE001 - as above: an error that cannot say itself must be heard of, too
        text = f"(its text is not available: {type(unsaid).__name__})"
    return f"{type(error).__name__} {known}\n{text}".encode(errors="replace")


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _classes() -> dict[str, type[EquipoiseError]]:
    """The package's errors that take only a text, by module and name."""
    found: dict[str, type[EquipoiseError]] = {}
    kinds: list[type[EquipoiseError]] = [EquipoiseError]
    for kind in kinds:
        if "__init__" not in vars(kind):
            found[_path(kind)] = kind
            kinds += kind.__subclasses__()
    return found


def _bytes(raw: bytes, size: int) -> torch.Tensor:
    """``raw`` as ``size`` bytes, truncated or zero-padded."""
    return torch.frombuffer(bytearray(raw[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _raw(message: torch.Tensor) -> bytes:
    return message.cpu().numpy().tobytes()
