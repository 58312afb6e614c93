"""Messages between the ranks of a group; a rank that fails or does not answer is named on every rank."""

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
"""The most seconds of the time-out reserved for finding out who is lost; a quarter of it if that is less."""


class RankLost(EquipoiseError, RuntimeError):
    """A rank did not answer within the time-out.

    Args:
        text: what was being done.
        ranks: ranks in the group that did not answer; empty if all did and sending still failed.
    """

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class OutOfStep(EquipoiseError, RuntimeError):
    """Ranks synchronized for different operations."""


class Channel:
    """Communication within a group; creating one is a collective call.

    Messages use a separate gloo group with its own time-out; tensors use ``group`` if it is NCCL. Each meeting of the
    ranks runs a part on every rank and votes on it, in the collective that exchanges message sizes.

    Each rank signs the group's store when it arrives at a meeting, and again if the meeting fails. Ranks that have not
    arrived by the time-out are named or, if all have, those that report no failure. This tells a dead rank from the
    ranks that fail because of it.

    Args:
        group: process group; None for the default one.
        timeout_s: seconds that a rank may keep others waiting, more than the longest decoding between two checks.
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
            OutOfStep: a rank started a different operation.
        """
        results: list[T] = []

        def run() -> Sequence[int]:
            results.append(part())
            return ()

        self._meet(run, doing)
        return results[0]

    def gather(self, part: Callable[[], bytes], doing: str) -> list[bytes]:
        """The message that each rank's part returns, by rank; raises like :meth:`together`."""
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
        """Send the messages that the part returns, one per rank; returns what each rank sent to this one.

        Args:
            part: this rank's part; may raise, see :meth:`together`.
            doing: the activity, for error texts.
            about: a value that must be equal on all ranks.
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
        """Wait for the operations of :meth:`start`."""
        for work in works:
            self._guard("sending caches", work.wait)

    def _meet(self, part: Callable[[], Sequence[int]], doing: str, about: object = None) -> list[list[int]]:
        """Numbers from each rank's part, padded to one per rank. Every meeting has this form.

        A failed rank can thus join whichever meeting comes next.
        """
        if self._is_broken:
            raise RankLost(f"the group lost a rank earlier, so {doing} cannot start; restart the group", ())
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
            raise OutOfStep(f"rank {others[0]} started a different operation than rank 0; did they make the same plan?")
        return [row[1:] for row in table]

    def _guard(self, doing: str, call: Callable[[], T]) -> T:
        start = time.monotonic()
        try:
            return call()
        except RuntimeError as error:  # torch raises it for a closed connection and for a time-out
            raise self._lost(doing, error, start) from error

    def _lost(self, doing: str, cause: Exception, start: float) -> RankLost:
        """Ranks that have not arrived by the time-out since ``start``, or died in this meeting."""
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
        text = f"{who} of {self.world_size} did not answer within {self.timeout_s:g} s while {doing}"
        return RankLost(f"{text}; it died or hangs: restart it", tuple(missing))

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
