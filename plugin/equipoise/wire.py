"""The one framing of binary messages: versioned, checksummed, with every count checked before memory is allocated.

Layout, little-endian: magic ``EQ``, version (u16), kind (u16), length of the body (u64), CRC-32 of the head so
far and of the body (u32), the body. Reading a message never executes it, as unpickling would.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.errors import EquipoiseError

_HEAD = struct.Struct("<2sHHQ")
_CRC = struct.Struct("<I")
_COUNT = struct.Struct("<I")
_MAGIC = b"EQ"
HEAD_BYTES = _HEAD.size + _CRC.size
"""Bytes before the body of a message."""


class WireError(EquipoiseError, ValueError):
    """A message is damaged, has another version, or breaks the rules of its kind."""


class Kind(IntEnum):
    """What a message contains. All kinds are listed here, so that none is mistaken for another."""

    TABLE = 1
    """A rank's unfinished requests."""
    STATES = 2
    """Requests that move."""
    PLAN = 4
    """Sizes of the micro-batches of a step."""


class Writer:
    """Writes the parts of one message.

    >>> out = Writer()
    >>> out.text("loss")
    >>> out.array([3, 1], "<i4")
    >>> read = Reader(out.message(Kind.PLAN, version=1), Kind.PLAN, version=1)
    >>> read.text(), read.array(2, "<i4").tolist()
    ('loss', [3, 1])
    >>> read.end()
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def pack(self, form: struct.Struct, *values: Any) -> None:
        """Add numbers of fixed size.

        Raises:
            WireError: a value is out of the range of its field.
        """
        try:
            self._parts.append(form.pack(*values))
        except struct.error as error:
            raise WireError(f"a value is out of the range of its field: {error}") from error

    def count(self, number: int) -> None:
        """Add the number of parts that follow; :meth:`Reader.count` reads it."""
        self.pack(_COUNT, number)

    def text(self, text: str) -> None:
        """Add a text, preceded by its length."""
        raw = text.encode()
        self.count(len(raw))
        self._parts.append(raw)

    def array(self, values: Any, dtype: str) -> None:
        """Add values of ``dtype``, for example ``"<i4"``, without their count; any shape, in C order.

        Raises:
            WireError: a value does not fit ``dtype``.
        """
        given = np.asarray(values)
        try:
            made = given.astype(dtype)
        except (OverflowError, TypeError, ValueError) as error:
            raise WireError(f"values do not fit {dtype}: {error}") from error
        if made.dtype.kind != "f" and not np.array_equal(made, given):
            raise WireError(f"values do not fit {dtype}: {given.min()} to {given.max()}")
        self._parts.append(made.tobytes())

    def message(self, kind: Kind, *, version: int) -> bytes:
        """The message: head, checksum, body."""
        body = b"".join(self._parts)
        head = _HEAD.pack(_MAGIC, version, kind, len(body))
        return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body


class Reader:
    """Reads a message from front to back, and nothing beyond its end.

    Args:
        raw: the message.
        kind: its required kind.
        version: its required version.

    Raises:
        WireError: the message is truncated, damaged, or of another kind or version.
    """

    def __init__(self, raw: bytes, kind: Kind, *, version: int) -> None:
        if len(raw) < HEAD_BYTES:
            raise WireError(f"a message is truncated: {len(raw)} bytes, but the head alone has {HEAD_BYTES}")
        magic, found_version, found_kind, length = _HEAD.unpack_from(raw)
        found, want = (magic, found_version, found_kind), (_MAGIC, version, int(kind))
        if found != want:
            raise WireError(f"a message starts with {found}, not {want}; run the same version on every node")
        self._body = memoryview(raw)[HEAD_BYTES:]
        self._at = 0
        (crc,) = _CRC.unpack_from(raw, _HEAD.size)
        if length != len(self._body) or zlib.crc32(self._body, zlib.crc32(raw[: _HEAD.size])) != crc:
            raise WireError(f"a message is damaged: {len(self._body)} of {length} bytes arrived, or some changed")

    @property
    def num_left(self) -> int:
        """Bytes left to read."""
        return len(self._body) - self._at

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        if not 0 <= size <= self.num_left:
            raise WireError(f"a message claims {size} more bytes, but has {self.num_left}")
        self._at += size
        return self._body[self._at - size : self._at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        """Numbers of fixed size."""
        return form.unpack(self.take(form.size))

    def count(self, least_size: int) -> int:
        """A number of parts of at least ``least_size`` bytes each, checked against the bytes left."""
        (number,) = self.unpack(_COUNT)
        if number * least_size > self.num_left:
            raise WireError(f"a message claims {number} parts, but has {self.num_left} bytes")
        return number

    def text(self) -> str:
        """A text that :meth:`Writer.text` wrote."""
        try:
            return bytes(self.take(self.count(1))).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"a text is not UTF-8: {error}") from error

    def array(self, number: int, dtype: str) -> npt.NDArray[Any]:
        """``number`` values of ``dtype``, read-only, shape (number,)."""
        return np.frombuffer(self.take(number * np.dtype(dtype).itemsize), dtype=dtype)

    def end(self) -> None:
        """Raise unless everything was read.

        Raises:
            WireError: bytes are left.
        """
        if self.num_left:
            raise WireError(f"a message has {self.num_left} bytes after its last part")
