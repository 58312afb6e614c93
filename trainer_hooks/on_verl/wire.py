"""What a plan looks like to a worker: a few bytes in the batch's extra information.

Rows are dispatched in plan order, so that a worker needs only the sizes of the micro-batches. Checksums of the row
lengths tell it whether the rows it holds are those that were planned. Bytes are copied for nothing, where verl makes a
deep copy of the extra information for every rank.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.errors import InvalidInput, must
from equipoise.planning.step import StepPlan

IntArray = npt.NDArray[np.int64]

_VERSION = 1
_HAS_SIZES, _TIMED = 1, 2  # flags


@dataclass(frozen=True, kw_only=True, eq=False)
class WirePlan:
    """A plan's layout by rank, without row ids.

    Attributes:
        sizes: rows of each micro-batch, one array (dp_size, micro-batches) a mini-batch; None where the plan only
            counts real rows.
        checksums: of each rank's row lengths in each mini-batch, shape (dp_size, num_mini_batches).
        num_real_rows: real rows of each mini-batch, shape (num_mini_batches,).
        max_tokens: tokens of the fullest micro-batch that is not a lone row, for each mini-batch.
        timed: the workers send back how long each micro-batch took.
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


def wire_of(plan: StepPlan, lengths: IntArray, *, sizes_too: bool = True, timed: bool = False) -> WirePlan:
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
        sizes=plan.sizes if sizes_too else None,
        checksums=checksums,
        num_real_rows=plan.num_real_rows,
        max_tokens=max_tokens,
        timed=timed,
    )


def wire_of_counts(lengths: IntArray, is_padding: npt.NDArray[np.bool_], dp_size: int, steps: int) -> WirePlan:
    """Only what padding changes, for rows that verl cuts itself: rank-major shares, mini-batches in order."""
    shares = lengths.reshape(dp_size, steps, -1)
    real = (~is_padding).reshape(dp_size, steps, -1).sum(axis=(0, 2))
    checksums = np.array([[checksum(rows) for rows in share] for share in shares], dtype=np.int64)
    return WirePlan(sizes=None, checksums=checksums, num_real_rows=real, max_tokens=np.zeros(steps, dtype=np.int64))


def encode(wire: WirePlan) -> bytes:
    """The plan as bytes: 32- and 64-bit little-endian integers behind a header of counts."""
    columns = [0] * wire.num_mini_batches if wire.sizes is None else [sizes.shape[1] for sizes in wire.sizes]
    flags = (wire.sizes is not None) * _HAS_SIZES + wire.timed * _TIMED
    header = np.array([_VERSION, wire.dp_size, wire.num_mini_batches, flags, *columns], dtype="<i8")
    parts = [header, wire.checksums, wire.num_real_rows, wire.max_tokens]
    body = b"".join(np.ascontiguousarray(part, dtype="<i8").tobytes() for part in parts)
    sizes = b"" if wire.sizes is None else b"".join(np.ascontiguousarray(s, "<i4").tobytes() for s in wire.sizes)
    return body + sizes


def decode(data: bytes) -> WirePlan:
    """The plan that ``encode`` wrote.

    Raises:
        InvalidInput: the bytes are none of this version's.
    """
    words = np.frombuffer(data, dtype="<i8", count=min(4, len(data) // 8))
    if words.size < 4 or int(words[0]) != _VERSION:
        version = int(words[0]) if words.size else None
        raise InvalidInput(
            must(
                "the plan's format", f"be version {_VERSION}", version, "install one version of equipoise on every node"
            )
        )
    ranks, steps = int(words[1]), int(words[2])
    columns = np.frombuffer(data, dtype="<i8", count=steps, offset=32)
    at = 32 + 8 * steps

    def take(*shape: int) -> IntArray:
        nonlocal at
        count = int(np.prod(shape))
        part = np.frombuffer(data, dtype="<i8", count=count, offset=at).astype(np.int64).reshape(shape)
        at += 8 * count
        return part

    checksums, real, tokens = take(ranks, steps), take(steps), take(steps)
    sizes: tuple[IntArray, ...] | None = None
    if words[3] & _HAS_SIZES:
        found: list[IntArray] = []
        for count in columns.tolist():
            part = np.frombuffer(data, dtype="<i4", count=ranks * count, offset=at).astype(np.int64)
            found.append(part.reshape(ranks, count))
            at += 4 * ranks * count
        sizes = tuple(found)
    return WirePlan(
        sizes=sizes, checksums=checksums, num_real_rows=real, max_tokens=tokens, timed=bool(words[3] & _TIMED)
    )
