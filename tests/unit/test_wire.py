"""Plans on their way to the workers."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import equipoise as eq
from equipoise.errors import EquipoiseWarning
from equipoise.trainer_hooks.on_verl.driver.rows import neutral_order
from equipoise.trainer_hooks.on_verl.wire import checksum, decode, encode, wire_of, wire_of_counts
from equipoise.wire import Kind, WireError, Writer

LENGTHS = np.random.default_rng(0).integers(2, 900, 64)


def planned(*, timed: bool = False) -> tuple[eq.StepPlan, bytes]:
    padding = np.arange(64) >= 60
    spec = eq.StepSpec(dp_size=4, num_mini_batches=4, max_token_len_per_gpu=2000)
    plan = eq.plan_step(LENGTHS, spec, is_padding=padding)
    return plan, encode(wire_of(plan, LENGTHS, timed=timed))


@pytest.mark.parametrize("timed", [False, True])
def test_a_plan_survives_the_way(timed: bool) -> None:
    plan, data = planned(timed=timed)
    got = decode(data)
    assert got.sizes is not None
    assert [s.tolist() for s in got.sizes] == [s.tolist() for s in plan.sizes]
    assert (got.dp_size, got.num_mini_batches, got.timed) == (4, 4, timed)
    assert got.num_real_rows.tolist() == plan.num_real_rows.tolist()
    assert got.max_tokens.max() == plan.stats.max_tokens
    for rank in range(4):
        for step, micro_batches in enumerate(plan.micro_batches(rank)):
            assert got.checksums[rank, step] == checksum(LENGTHS[np.concatenate(micro_batches)])
            assert got.sizes[step][rank].tolist() == [rows.size for rows in micro_batches]


def test_the_fullest_micro_batch_leaves_lone_rows_out() -> None:
    lengths = np.array([9, 2, 3, 2])
    spec = eq.StepSpec(dp_size=1, num_mini_batches=1, max_token_len_per_gpu=7, oversize="alone")
    with pytest.warns(EquipoiseWarning, match=r"lengths\[0\]"):
        plan = eq.plan_step(lengths, spec)
    assert decode(encode(wire_of(plan, lengths))).max_tokens.tolist() == [7]


def test_the_bytes_are_few_and_never_copied() -> None:
    lengths = np.random.default_rng(0).integers(2, 900, 65536)
    plan = eq.plan_step(lengths, eq.StepSpec(dp_size=512, num_mini_batches=8, algorithm="lpt"))
    data = encode(wire_of(plan, lengths))
    assert len(data) < 65536
    assert copy.deepcopy(data) is data


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The message with a bit flipped, bytes cut out, put in or exchanged, or a part written twice."""
    raw, at = bytearray(data), draw.randrange(len(data))
    kind = draw.randrange(6)
    if kind == 0:
        raw[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del raw[at:]
    elif kind == 2:
        del raw[at : at + draw.randint(1, 16)]
    elif kind == 3:
        raw[at:at] = draw.randbytes(draw.randint(1, 16))
    elif kind == 4:
        raw[at : at + 8] = draw.randbytes(min(8, len(raw) - at))
    else:
        raw += raw[at:]
    return bytes(raw)


def test_every_damaged_message_is_refused_with_one_error() -> None:
    draw = random.Random(0)
    whole = [planned()[1], planned(timed=True)[1], encode(wire_of_counts(LENGTHS, LENGTHS < 0, 2, 4))]
    accepted: list[bytes] = []
    for number in range(6000):
        data = whole[number % 3]
        broken = damaged(data, draw)
        if broken == data:
            continue
        try:
            decode(broken)
        except WireError:
            continue
        accepted.append(broken)
    assert accepted == []


@pytest.mark.parametrize("data", [None, 7, "plan", b"", b"\x07" * 64, bytearray(b"EQ")])
def test_what_is_no_message_is_refused(data: object) -> None:
    with pytest.raises(WireError):
        decode(data)


@pytest.mark.parametrize(
    ("header", "sizes"),
    [((0, 1, 0), None), ((1, 0, 0), None), ((1, 1, 4), None), ((1, 1, 1), [0]), ((1, 1, 1), list[int]())],
)
def test_a_message_that_is_no_plan_is_refused(header: tuple[int, int, int], sizes: list[int] | None) -> None:
    out = Writer()
    out.array(header, "<u4")
    out.array([0] * (header[0] * header[1] + 2 * header[1]), "<i8")
    if sizes is not None:
        out.count(len(sizes))
        out.array(sizes, "<i4")
    with pytest.raises(WireError):
        decode(out.message(Kind.PLAN, version=2))


def test_counts_alone_cut_the_batch_as_verl_does() -> None:
    lengths = np.arange(1, 17)
    padding = np.arange(16) >= 13
    wire = decode(encode(wire_of_counts(lengths, padding, 2, 4)))
    assert wire.sizes is None
    # rank 0 has rows 0-7, rank 1 rows 8-15; two rows each to a step
    assert wire.num_real_rows.tolist() == [4, 4, 3, 2]
    assert wire.checksums[1, 2] == checksum([13, 14])


def test_rows_are_put_in_an_order_that_knows_nothing_of_their_length() -> None:
    keys = ["b_0_0", "a_10_0", "pad_0_0", "a_9_0", "b_0_1"]
    tags = [{"seq_len": 1, "is_padding": key.startswith("pad")} for key in keys]
    order = neutral_order(_Batch(keys, tags))
    assert [keys[i] for i in order] == ["a_9_0", "a_10_0", "b_0_0", "b_0_1", "pad_0_0"]


class _Batch(SimpleNamespace):
    def __init__(self, keys: list[str], tags: list[Any]) -> None:
        super().__init__(keys=keys, tags=tags)

    def __len__(self) -> int:
        return len(self.keys)
