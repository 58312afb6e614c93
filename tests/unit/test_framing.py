"""The framing of binary messages: what goes in comes out, and what is damaged or does not fit is refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from equipoise.wire import HEAD_BYTES, Kind, Reader, WireError, Writer


def message() -> bytes:
    out = Writer()
    out.count(2)
    out.pack(struct.Struct("<Hd"), 7, 0.5)
    out.text("ü")
    out.array(np.array([[1, -2], [3, 2**31 - 1]]), "<i4")
    out.array([float("nan"), float("inf")], "<f8")
    return out.message(Kind.PLAN, version=5)


def test_what_goes_in_comes_out() -> None:
    read = Reader(message(), Kind.PLAN, version=5)
    assert read.count(1) == 2
    assert read.unpack(struct.Struct("<Hd")) == (7, 0.5)
    assert read.text() == "ü"
    assert read.array(4, "<i4").tolist() == [1, -2, 3, 2**31 - 1]
    assert np.isnan(read.array(2, "<f8")[0])
    assert read.num_left == 0
    read.end()


def test_every_cut_every_changed_bit_and_every_byte_too_many_is_refused() -> None:
    raw = message()
    damaged = [raw[:end] for end in range(len(raw))] + [raw + b"\0"]
    for place in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[place // 8] ^= 1 << place % 8
        damaged.append(bytes(changed))
    for each in damaged:
        with pytest.raises(WireError):
            Reader(each, Kind.PLAN, version=5)


def test_another_kind_or_version_is_refused() -> None:
    with pytest.raises(WireError, match=r"5, 4.*5, 1"):
        Reader(message(), Kind.TABLE, version=5)
    with pytest.raises(WireError, match=r"5, 4.*6, 4"):
        Reader(message(), Kind.PLAN, version=6)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([2**31], "<i4"),
        (np.array([2**31]), "<i4"),
        (np.array([-1]), "<u4"),
        ([2**70], "<i8"),
        ([0.5], "<i4"),
        (["a"], "<i4"),
        ([None], "<i4"),
    ],
)
def test_values_that_do_not_fit_are_refused_when_written(values: Any, dtype: str) -> None:
    with pytest.raises(WireError):
        Writer().array(values, dtype)


def test_numbers_out_of_the_range_of_their_field_are_refused_when_written() -> None:
    with pytest.raises(WireError):
        Writer().pack(struct.Struct("<B"), 256)
    with pytest.raises(WireError):
        Writer().count(-1)


def test_nothing_is_read_past_the_end_or_left_over() -> None:
    def reader(*numbers: int) -> Reader:
        out = Writer()
        for number in numbers:
            out.count(number)
        return Reader(out.message(Kind.STATES, version=1), Kind.STATES, version=1)

    assert reader(1, 0).count(4) == 1
    for refused in (
        lambda: reader(2, 0).count(4),
        lambda: reader(1).take(5),
        lambda: reader(1).take(-1),
        lambda: reader(9).text(),
        lambda: reader(1).array(2, "<i4"),
        lambda: reader(1).end(),
    ):
        with pytest.raises(WireError):
            refused()


def test_the_head_is_as_long_as_it_says() -> None:
    assert len(Writer().message(Kind.STATES, version=1)) == HEAD_BYTES
