"""Messages between the ranks of a group; whoever fails or does not answer is named on every rank."""

# pyright: reportPrivateUsage=false
# The store of the process group has no public name.

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equipoise.errors import EquipoiseError, InvalidInput, must
from equipoise.together import attempt, gather_numbers

T = TypeVar("T")
_POLL_S = 0.02
_ROLL_S = 10.0
"""Most of the time-out that is kept for finding out who is lost; a quarter of it, if that is less."""


class RankLost(EquipoiseError, RuntimeError):
    """A rank did not answer within the time-out.

    Args:
        text: what was going on.
        ranks: who did not answer, by rank in the group; empty where all did and sending failed all the same.
    """

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class OutOfStep(EquipoiseError, RuntimeError):
    """Ranks met, but not to do the same thing."""


class Channel:
    """Talk of one group; a collective call to make.

    Messages go over a gloo group of their own, with their own time-out; tensors go over ``group`` where it is NCCL.
    Each meeting runs a part of every rank and votes on it, in the collective that tells the sizes of messages.

    Each rank signs a roll in the group's store when it comes to a meeting, and again if that fails. Those that have not
    come when the time-out is over are named, or, if all have, those that say nothing of a failure. A rank that dies is
    thus told from ranks that fail because of it.

    Args:
        group: process group; the default one if None.
        timeout_s: seconds that a rank may let others wait. The longest stretch of decoding between two checks must fit.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 600.0) -> None:
        if not dist.is_initialized():
            raise InvalidInput(
                must("torch.distributed", "be initialized", "no process group", "call init_process_group")
            )
        self.timeout_s = timeout_s
        self.data = dist.group.WORLD if group is None else group
        self.members: list[int] = dist.get_process_group_ranks(self.data)
        self.rank = dist.get_rank(self.data)
        self.world_size = len(self.members)
        wait = timedelta(seconds=timeout_s - min(_ROLL_S, timeout_s / 4))
        self.control = cast(
            Any, dist.new_group(self.members, timeout=wait, backend="gloo", use_local_synchronization=True)
        )
        on_gpu = "nccl" in str(dist.get_backend(self.data))
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        key = torch.tensor([time.time_ns()])
        dist.broadcast(key, src=self.members[0], group=self.control)
        self._roll: Any = c10d.PrefixStore(f"equipoise/rollout/{int(key)}", c10d._get_default_store())
        self._num_met = 0
        self._is_broken = False

    def together(self, part: Callable[[], T], doing: str) -> T:
        """Run this rank's part, and raise on all ranks if it fails on any: :func:`equipoise.together.together`.

        Raises:
            RankLost: a rank did not answer.
            OutOfStep: a rank came to do something else.
        """
        results: list[T] = []

        def run() -> Sequence[int]:
            results.append(part())
            return ()

        self._meet(run, doing)
        return results[0]

    def gather(self, part: Callable[[], bytes], doing: str) -> list[bytes]:
        """The message that the part of each rank returns, by rank; raises as :meth:`together`."""
        messages: list[bytes] = []

        def run() -> Sequence[int]:
            messages.append(part())
            return [len(messages[0])]

        counts = [row[0] for row in self._meet(run, doing)]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(messages[0])] = _bytes(messages[0])
        found: list[torch.Tensor] = [torch.empty_like(padded) for _ in self.members]
        self._guard(doing, partial(_all_gather, found, padded, self.control))
        return [found[rank][:count].numpy().tobytes() for rank, count in enumerate(counts)]

    def scatter(self, part: Callable[[], Sequence[bytes]], doing: str, *, about: object = None) -> list[bytes]:
        """Send the messages that the part returns, one to each rank; returns what each rank sent to this one.

        Args:
            part: this rank's; may raise, see :meth:`together`.
            doing: what is being done, for the text of errors.
            about: what all ranks must come with alike.
        """
        messages: list[bytes] = []

        def run() -> Sequence[int]:
            messages.extend(part())
            return [len(message) for message in messages]

        table = self._meet(run, doing, about)
        if not any(any(row) for row in table):
            return messages
        counts = [row[self.rank] for row in table]
        found = torch.zeros(sum(counts), dtype=torch.uint8)
        sent, sizes = _bytes(b"".join(messages)), [len(message) for message in messages]
        self._guard(doing, partial(_all_to_all, found, sent, counts, sizes, self.control))
        parts: Sequence[torch.Tensor] = torch.split(found, counts)
        return [part.numpy().tobytes() for part in parts]

    def start(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> Any:
        """Start a batch of point-to-point sends and receives of tensors; :meth:`finish` waits for it."""
        group = self.data if self.device.type == "cuda" else self.control
        ops = [dist.P2POp(dist.isend, tensor, self.members[rank], group) for rank, tensor in sends]
        ops += [dist.P2POp(dist.irecv, tensor, self.members[rank], group) for rank, tensor in receives]
        return self._guard("starting to send caches", lambda: dist.batch_isend_irecv(ops) if ops else [])

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for what :meth:`start` returned."""
        for work in works:
            self._guard("sending caches", work.wait)

    def _meet(self, part: Callable[[], Sequence[int]], doing: str, about: object = None) -> list[list[int]]:
        """Numbers of each rank's part, padded to one for each rank. Every meeting has this form.

        So a rank that fails finds the others at their next meeting, whichever that is.
        """
        if self._is_broken:
            raise RankLost(f"the group lost a rank earlier, so {doing} cannot start; start the group again", ())
        mine = attempt(part)
        topic = zlib.crc32(f"{doing}: {about}".encode())
        pad = (0,) * self.world_size
        self._num_met += 1
        self._roll.set(str(self.rank), str(self._num_met))
        start = time.monotonic()
        try:
            table = gather_numbers(
                lambda: (topic, *(*mine.get(), *pad)[: self.world_size]),
                count=1 + self.world_size,
                group=self.control,
                doing=doing,
            )
        except RuntimeError as error:
            if error is mine.failure or isinstance(error, EquipoiseError):
                raise
            raise self._lost(doing, error, start) from error
        others = [rank for rank, row in enumerate(table) if row[0] != table[0][0]]
        if others:
            raise OutOfStep(f"rank {others[0]} came to do something else than rank 0; did they plan the same?")
        return [row[1:] for row in table]

    def _guard(self, doing: str, call: Callable[[], T]) -> T:
        start = time.monotonic()
        try:
            return call()
        except RuntimeError as error:  # what torch raises for a closed connection and for a time-out
            raise self._lost(doing, error, start) from error

    def _lost(self, doing: str, cause: Exception, start: float) -> RankLost:
        """Who has not come to this meeting when the time-out that began at ``start`` is over, or died in it."""
        self._is_broken = True
        end = start + self.timeout_s
        try:
            self._roll.set(f"{self.rank} failed", "")
            missing = self._absent(self._has_come, end)
            missing = missing or self._absent(lambda rank: self._roll.check([f"{rank} failed"]), end)
        except RuntimeError as error:
            return RankLost(f"the host of the process group's store was lost while {doing}: {error}", (0,))
        if not missing:
            return RankLost(f"{doing} failed, though all ranks are alive: {cause}", ())
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        text = f"{who} of {self.world_size} gave no answer within {self.timeout_s:g} s while {doing}"
        return RankLost(f"{text}; it died or hangs: start it again", tuple(missing))

    def _has_come(self, rank: int) -> bool:
        return self._roll.check([str(rank)]) and int(self._roll.get(str(rank))) >= self._num_met

    def _absent(self, is_here: Callable[[int], bool], end: float) -> list[int]:
        """Ranks that are not here at ``end``; returns as soon as all are."""
        missing = list(range(self.world_size))
        while True:
            missing = [rank for rank in missing if not is_here(rank)]
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(_POLL_S)


def _all_gather(found: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
    dist.all_gather(found, mine, group=group)


def _all_to_all(found: torch.Tensor, sent: torch.Tensor, counts: list[int], sizes: list[int], group: Any) -> None:
    dist.all_to_all_single(found, sent, counts, sizes, group=group)


def _bytes(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.zeros(0, dtype=torch.uint8)
