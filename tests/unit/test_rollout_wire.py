"""Messages between ranks: what goes in comes out; what was cut, changed or made up is refused."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace

import pytest

from equipoise.rollout.transfer import EngineFacts, KVLayout, RequestState, Sampling, wire
from equipoise.wire import WireError

STATES = [
    RequestState(id="a", prompt=(1, 2, 3), sampling=Sampling(seed=2**63 - 1, stop_token_ids=(7, 9), top_p=0.3)),
    RequestState(
        id="ü/2",
        prompt=(5,),
        sampling=Sampling(temperature=0.0, presence_penalty=-1.5, max_tokens=3),
        home=3,
        index=9,
        output=(4, 7),
        log_probs=(-0.1, float("-inf")),
        finish_reason="stop",
    ),
]
TABLE = wire.Table(
    facts=EngineFacts(
        layout=KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16, dtype="bfloat16"),
        model="m",
        tiers=(8, 4),
        slots=8,
        free_blocks=2**40,
        num_blocks=2**41,
    ),
    check=4,
    settings=2**32 - 1,
    rows=(
        wire.Row(id="a", home=1, prompt=7, num_tokens=9, num_output=5, num_cached=8, running=True, max_remaining=2**31),
    ),
    samples=((8, 123, 0.25),),
    finished=((7, 88),),
    exchange_s=0.5,
    prefilled=(77, 0.125),
)


def test_what_goes_in_comes_out() -> None:
    assert wire.unpack_states(wire.pack_states(STATES)) == STATES
    assert wire.unpack_states(wire.pack_states([])) == []
    assert wire.unpack_table(wire.pack_table(TABLE)) == TABLE


def test_tokens_of_a_cache_are_told_only_with_one() -> None:
    state = replace(STATES[0], num_cached=2)
    assert wire.unpack_states(wire.pack_states([state]))[0].num_cached == 0
    assert wire.unpack_states(wire.pack_states([replace(state, kv=[])]))[0].num_cached == 2


def test_every_cut_is_refused() -> None:
    for raw, unpack in ((wire.pack_states(STATES), wire.unpack_states), (wire.pack_table(TABLE), wire.unpack_table)):
        for end in range(len(raw)):
            with pytest.raises(WireError):
                unpack(raw[:end])
        with pytest.raises(WireError):
            unpack(raw + b"\0")


def test_every_changed_byte_is_refused() -> None:
    raw = wire.pack_states(STATES)
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 0x41
        with pytest.raises(WireError):
            wire.unpack_states(bytes(changed))


def _signed(raw: bytes, body: bytes) -> bytes:
    """A message with another body whose checksum is right."""
    head = raw[:6] + struct.pack("<Q", len(body))
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def test_a_made_up_body_is_refused_or_a_legal_request_and_never_read_past_its_end() -> None:
    """As a sender of another build would write it: checksums are right, contents are not."""
    draws = random.Random(0)
    legal = 0
    for raw, unpack in ((wire.pack_states(STATES), wire.unpack_states), (wire.pack_table(TABLE), wire.unpack_table)):
        body = raw[18:]
        assert _signed(raw, body) == raw
        for _ in range(1500):
            changed = bytearray(body)
            for _ in range(draws.randint(1, 3)):
                changed[draws.randrange(len(changed))] = draws.choice((0, 1, 0x7F, 0x80, 0xFF))
            cut = bytes(changed[: draws.choice((len(changed), draws.randrange(len(changed))))])
            try:
                unpack(_signed(raw, cut))
                legal += 1
            except WireError:
                pass
    assert 0 < legal < 2500


def test_a_count_beyond_the_message_is_refused_before_memory_is_taken() -> None:
    raw = wire.pack_states(STATES)
    with pytest.raises(WireError, match="4294967295"):
        wire.unpack_states(_signed(raw, b"\xff\xff\xff\xff" + raw[22:]))


@pytest.mark.parametrize(
    ("field", "value"), [("prompt", (2**31,)), ("prompt", (-1,)), ("home", -1), ("index", 2**32), ("home", 2**40)]
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(WireError):
        wire.unpack_states(wire.pack_states([replace(STATES[0], **{field: value})]))


def test_kinds_and_versions_are_told_apart() -> None:
    with pytest.raises(WireError, match=r"3, 2.*3, 1"):
        wire.unpack_table(wire.pack_states(STATES))
    raw = bytearray(wire.pack_states([]))
    raw[2] += 1
    with pytest.raises(WireError, match=r"4, 2.*3, 2"):
        wire.unpack_states(bytes(raw))
