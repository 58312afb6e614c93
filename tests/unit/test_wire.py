"""Plans on their way to the workers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import equipoise as eq
from equipoise.trainer_hooks.on_verl.driver.rows import neutral_order
from equipoise.trainer_hooks.on_verl.wire import checksum, decode, encode, wire_of, wire_of_counts


def test_a_plan_survives_the_way() -> None:
    lengths = np.random.default_rng(0).integers(2, 900, 64)
    padding = np.arange(64) >= 60
    plan = eq.plan_step(
        lengths, eq.StepSpec(dp_size=4, num_mini_batches=4, max_token_len_per_gpu=2000), is_padding=padding
    )
    sent = wire_of(plan, lengths)
    got = decode(encode(sent))
    assert got.sizes is not None
    assert [s.tolist() for s in got.sizes] == [s.tolist() for s in plan.sizes]
    assert got.num_real_rows.tolist() == plan.num_real_rows.tolist()
    assert got.checksums.tolist() == sent.checksums.tolist()
    assert got.max_tokens.max() == plan.stats.max_tokens
    for rank in range(4):
        for step, micro_batches in enumerate(plan.micro_batches(rank)):
            assert got.checksums[rank, step] == checksum(lengths[np.concatenate(micro_batches)])


def test_the_bytes_are_few_and_never_copied() -> None:
    lengths = np.random.default_rng(0).integers(2, 900, 65536)
    plan = eq.plan_step(lengths, eq.StepSpec(dp_size=512, num_mini_batches=8, algorithm="lpt"))
    data = encode(wire_of(plan, lengths))
    assert len(data) < 65536
    assert copy.deepcopy(data) is data


def test_other_bytes_are_refused() -> None:
    with pytest.raises(eq.InvalidInput, match="format must be version 1"):
        decode(b"\x07" * 64)
    with pytest.raises(eq.InvalidInput, match="format must be version 1"):
        decode(b"")


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
