"""A plan on its way to a worker: a few bytes in the batch's extra information.

Rows are dispatched in plan order, so a worker needs only the sizes of the micro-batches. Checksums of the row lengths
tell it whether its rows are the planned ones. verl deep-copies the extra information for every rank, which is free for
bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise._arrays import BoolArray, IntArray
from equipoise.planning.step import StepPlan
from equipoise.wire import Kind, Reader, WireError, Writer

_VERSION = 2
_HEADER = struct.Struct("<III")  # ranks, mini-batches, flags
_HAS_SIZES, _TIMED = 1, 2  # flags


@dataclass(frozen=True, kw_only=True, eq=False)
class WirePlan:
    """A plan's layout by rank, without row ids.

    Attributes:
        sizes: rows of each micro-batch, one array (dp_size, micro-batches) per mini-batch; None if the plan only counts
            real rows.
        checksums: of each rank's row lengths in each mini-batch, shape (dp_size, num_mini_batches).
        num_real_rows: real rows of each mini-batch, shape (num_mini_batches,).
        max_tokens: for each mini-batch, tokens of the fullest micro-batch with more than one row.
        timed: whether the workers send back how long each micro-batch took.
    """

    sizes: tuple[IntArray, ...] | None
    checksums: IntArray
    num_real_rows: IntArray
    max_tokens: IntArray
    timed: bool = False

    @property
    def dp_size(self) -> int:
        """Number of ranks."""
        return self.checksums.shape[0]

    @property
    def num_mini_batches(self) -> int:
        """Number of optimizer steps, 1 for a pass."""
        return self.checksums.shape[1]


def checksum(lengths: Any) -> int:
    """Checksum of row lengths in order."""
    return zlib.crc32(np.asarray(lengths, dtype="<i8").tobytes())


def wire_of(plan: StepPlan, lengths: IntArray, *, timed: bool = False) -> WirePlan:
    """The layout of ``plan`` for rows of these lengths, shape (n,), in the caller's numbering."""
    ranks, steps = plan.dp_size, plan.num_mini_batches
    checksums = np.zeros((ranks, steps), dtype=np.int64)
    max_tokens = np.zeros(steps, dtype=np.int64)
    for rank in range(ranks):
        for step, micro_batches in enumerate(plan.micro_batches(rank)):
            rows = np.concatenate(micro_batches)
            checksums[rank, step] = checksum(lengths[rows])
            shared = [int(lengths[m].sum()) for m in micro_batches if m.size > 1]
            max_tokens[step] = max([int(max_tokens[step]), *shared])
    return WirePlan(
        sizes=plan.sizes,
        checksums=checksums,
        num_real_rows=plan.num_real_rows,
        max_tokens=max_tokens,
        timed=timed,
    )


def wire_of_counts(lengths: IntArray, is_padding: BoolArray, dp_size: int, steps: int) -> WirePlan:
    """Only what padding changes, for rows that verl cuts itself: rank-major shares, mini-batches in order."""
    shares = lengths.reshape(dp_size, steps, -1)
    real = (~is_padding).reshape(dp_size, steps, -1).sum(axis=(0, 2))
    checksums = np.array([[checksum(rows) for rows in share] for share in shares], dtype=np.int64)
    return WirePlan(sizes=None, checksums=checksums, num_real_rows=real, max_tokens=np.zeros(steps, dtype=np.int64))


def encode(wire: WirePlan) -> bytes:
    """The plan as one message."""
    out = Writer()
    flags = (wire.sizes is not None) * _HAS_SIZES + wire.timed * _TIMED
    out.pack(_HEADER, wire.dp_size, wire.num_mini_batches, flags)
    for numbers in (wire.checksums, wire.num_real_rows, wire.max_tokens):
        out.array(numbers, "<i8")
    for sizes in wire.sizes or ():
        out.count(sizes.shape[1])
        out.array(sizes, "<i4")
    return out.message(Kind.PLAN, version=_VERSION)


def decode(data: object) -> WirePlan:
    """The plan that :func:`encode` wrote.

    Raises:
        WireError: not a message, corrupted, of another version, or with values that no plan has.
    """
    if not isinstance(data, bytes):
        raise WireError(f"a plan's message is {type(data).__name__}, not bytes; run one version on every node")
    read = Reader(data, Kind.PLAN, version=_VERSION)
    ranks, steps, flags = read.unpack(_HEADER)
    if not ranks or not steps or flags & ~(_HAS_SIZES | _TIMED):
        raise WireError(f"a plan names {ranks} ranks, {steps} mini-batches and flags {flags:#x}")

    def take(*shape: int) -> IntArray:
        return read.array(math.prod(shape), "<i8").astype(np.int64).reshape(shape)

    checksums, real, tokens = take(ranks, steps), take(steps), take(steps)
    sizes: list[IntArray] = []
    if flags & _HAS_SIZES:
        for _ in range(steps):
            columns = read.count(4 * ranks)
            sizes.append(read.array(ranks * columns, "<i4").astype(np.int64).reshape(ranks, columns))
    read.end()
    if any(not each.size or each.min() < 1 for each in sizes):
        raise WireError("a plan has an empty micro-batch")
    return WirePlan(
        sizes=tuple(sizes) if sizes else None,
        checksums=checksums,
        num_real_rows=real,
        max_tokens=tokens,
        timed=bool(flags & _TIMED),
    )
