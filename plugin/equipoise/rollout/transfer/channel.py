"""Messages between the ranks of a group; whoever does not answer is named on every rank."""

# pyright: reportPrivateUsage=false
# The store of the process group has no public name.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from equipoise.errors import EquipoiseError, InvalidInput, must

T = TypeVar("T")
_POLL_S = 0.02


class RankLost(EquipoiseError, RuntimeError):
    """A rank did not answer within the time-out.

    Args:
        text: what was going on.
        ranks: who did not answer, by rank in the group; empty where all did and the exchange failed all the same.
    """

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class Channel:
    """Talk of one group; a collective call to make.

    Messages go over a gloo group of their own, with their own time-out; tensors go over ``group`` where it is NCCL.
    When a call fails, each rank signs a roll in the group's store and waits until the others have, or the time-out is
    over; those that have not are named. A rank that dies is thus told from ranks that fail because of it.

    Args:
        group: process group; the default one if None.
        timeout_s: seconds that a rank may let others wait. The longest stretch of decoding between two checks must fit.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 600.0) -> None:
        if not dist.is_initialized():
            raise InvalidInput(
                must("torch.distributed", "be initialized", "no process group", "call init_process_group")
            )
        if not timeout_s > 0:
            raise InvalidInput(must("timeout_s", "be above 0", timeout_s, "pass seconds"))
        self.timeout_s = timeout_s
        self.data = dist.group.WORLD if group is None else group
        self.members: list[int] = dist.get_process_group_ranks(self.data)
        self.rank = dist.get_rank(self.data)
        self.world_size = len(self.members)
        self.control = cast(
            Any,
            dist.new_group(
                self.members, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
            ),
        )
        on_gpu = "nccl" in str(dist.get_backend(self.data))
        self.tensors = self.data if on_gpu else self.control
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        key = torch.tensor([time.time_ns()])
        dist.broadcast(key, src=self.members[0], group=self.control)
        self._roll: Any = c10d.PrefixStore(f"equipoise/rollout/{int(key)}", c10d._get_default_store())

    def gather(self, message: bytes, doing: str) -> list[bytes]:
        """The message of each rank, by rank."""
        return self._guard(doing, lambda: self._gather(message))

    def _gather(self, message: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.members]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self.control)
        counts = [int(size) for size in sizes]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(message)] = _bytes(message)
        found: list[torch.Tensor] = [torch.empty_like(padded) for _ in self.members]
        dist.all_gather(found, padded, group=self.control)
        return [found[rank][:count].numpy().tobytes() for rank, count in enumerate(counts)]

    def scatter(self, messages: Sequence[bytes], doing: str) -> list[bytes]:
        """Send a message to each rank; returns what each sent to this one. All-to-all: sizes, then contents."""
        return self._guard(doing, lambda: self._scatter(messages))

    def _scatter(self, messages: Sequence[bytes]) -> list[bytes]:
        mine = torch.tensor([len(message) for message in messages])
        theirs = torch.zeros_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.control)
        counts = cast("list[int]", theirs.tolist())
        found = torch.zeros(sum(counts), dtype=torch.uint8)
        sent = _bytes(b"".join(messages))
        dist.all_to_all_single(found, sent, counts, [len(message) for message in messages], group=self.control)
        parts: Sequence[torch.Tensor] = torch.split(found, counts)
        return [part.numpy().tobytes() for part in parts]

    def start(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> Any:
        """Start a batch of point-to-point sends and receives of tensors; :meth:`finish` waits for it."""
        group = self.tensors
        ops = [dist.P2POp(dist.isend, tensor, self.members[rank], group) for rank, tensor in sends]
        ops += [dist.P2POp(dist.irecv, tensor, self.members[rank], group) for rank, tensor in receives]
        return self._guard("starting to send caches", lambda: dist.batch_isend_irecv(ops) if ops else [])

    def finish(self, works: Sequence[Any]) -> None:
        """Wait for what :meth:`start` returned."""
        for work in works:
            self._guard("sending caches", work.wait)

    def _guard(self, doing: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:  # what torch raises for a closed connection and for a time-out
            raise self._lost(doing, error) from error

    def _lost(self, doing: str, cause: Exception) -> RankLost:
        """Call the roll: who has not signed within the time-out is lost."""
        deadline = time.monotonic() + self.timeout_s
        missing = list(range(self.world_size))
        try:
            self._roll.set(str(self.rank), "here")
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._roll.check([str(rank)])]
                time.sleep(_POLL_S if missing else 0)
        except RuntimeError as error:
            text = f"the store of the process group must answer while {doing}, got {error}; its host is gone"
            return RankLost(text, (0,))
        if not missing:
            return RankLost(f"all ranks must take part in {doing}; all are alive, but one failed: {cause}", ())
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        rule = f"{who} of {self.world_size} must answer within {self.timeout_s:g} s while {doing}"
        return RankLost(f"{rule}, got nothing; it died or hangs, start it again", tuple(missing))


def _bytes(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.zeros(0, dtype=torch.uint8)
