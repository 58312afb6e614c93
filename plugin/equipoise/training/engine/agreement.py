"""Ranks agree on the number of micro-batches, and on what is wrong with any rank's rows, in one all-reduce."""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, cast

import torch
import torch.distributed as dist

from equipoise.errors import InfeasiblePlan, InvalidInput, must
from equipoise.training.engine.device import collective_device

_CAP = "max_token_len (max_token_len_per_gpu of an engine, × sp_size)"


class Fault(IntEnum):
    """Why a rank cannot cut its rows; the number travels, and every rank says the same."""

    NONE = 0
    OVERSIZE = 1
    """A row (or group of rows) has more tokens than the cap."""
    ODD = 2
    """The rows are no multiple of the group size."""
    INDIVISIBLE = 3
    """The rows are no multiple of the fixed micro-batch size."""
    MALFORMED = 4
    """The batch lacks what is needed; the rank's own error says what."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one rank has to say before any rank may go on.

    Attributes:
        count: micro-batches that its rows need.
        most: micro-batches that its rows can fill.
        fault: see :class:`Fault`.
        row: where the fault is.
        got: the value at fault.
        settings: checksum of what all ranks were asked for.
    """

    count: int = 0
    most: int = 0
    fault: int = Fault.NONE
    row: int = 0
    got: int = 0
    settings: int = 0


def checksum(*settings: Any) -> int:
    """A number that is the same on every rank if the settings are."""
    return zlib.crc32(repr(settings).encode())


def agree(mine: Need, group: Any) -> list[Need]:
    """The needs of all ranks of ``group``, by rank; one all-reduce of six integers a rank, none for a single rank."""
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    numbers = astuple(mine)
    table = torch.zeros(dist.get_world_size(group), len(numbers), dtype=torch.int64, device=collective_device(group))
    table[dist.get_rank(group)] = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(table, group=group)
    rows = cast("list[list[int]]", table.tolist())
    names = tuple(Need.__dataclass_fields__)
    return [Need(**dict(zip(names, row, strict=True))) for row in rows]


def raise_alike(needs: list[Need], *, cap: int | None, force_group_size: int, micro_batch_size: int | None) -> None:
    """Raise the first fault of any rank: the same error on every rank.

    Raises:
        InvalidInput: settings that differ, an odd row count, rows that the fixed size does not divide.
        InfeasiblePlan: a row above the cap.
    """
    for rank, need in enumerate(needs):
        if need.settings != needs[0].settings:
            rule = "be the same on all ranks"
            raise InvalidInput(
                must("micro-batch settings", rule, f"others on rank {rank} than on 0", "mend its config")
            )
    for rank, need in enumerate(needs):
        if need.fault == Fault.NONE:
            continue
        if need.fault == Fault.OVERSIZE:
            what = "row" if force_group_size == 1 else f"group of {force_group_size} rows from row"
            rule = f"have at most {cap} tokens, the cap of a micro-batch"
            remedy = f'raise {_CAP} to {need.got}, shorten the row, or pass oversize="alone"'
            raise InfeasiblePlan(must(f"{what} {need.row} of rank {rank}", rule, need.got, remedy))
        if need.fault == Fault.ODD:
            rule = f"be a multiple of force_group_size = {force_group_size}"
            raise InvalidInput(must(f"rows of rank {rank}", rule, need.got, "keep groups whole on each rank"))
        if need.fault == Fault.INDIVISIBLE:
            rule = f"be a multiple of micro_batch_size = {micro_batch_size}"
            legal = [size for size in range(1, need.got + 1) if need.got % size == 0 and size % force_group_size == 0]
            raise InvalidInput(must(f"rows of rank {rank}", rule, need.got, f"legal sizes: {legal}"))
        raise InvalidInput(must(f"data of rank {rank}", "hold rows that can be measured", "none", "see its own error"))


def raise_shortage(needs: list[Need], count: int, *, multiple: int) -> None:
    """Raise if a rank cannot fill ``count`` micro-batches.

    Raises:
        InfeasiblePlan: names the rank, on every rank.
    """
    for rank, need in enumerate(needs):
        if need.most < count:
            rule = (
                f"fill {count} micro-batches, as many as other ranks, min_micro_batches or multiple = {multiple} need"
            )
            remedy = f'raise {_CAP}, balance rows with a plan, or pass on_shortage="zero_weight"'
            raise InfeasiblePlan(must(f"rows of rank {rank}", rule, f"enough for {need.most}", remedy))
