"""MindSpeed-RL's rule, stated anew."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.clock import Clock
from benchmarks.rules.verl import differencing
from benchmarks.verl_rule import MicroBatches


def mindspeed_rl(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """Each rank that asks gets one part of a heap partition of what is left; its mini-batches are cut in order.

    Micro-batches: a heap packing under the cap gives a count, its maximum over ranks is the number of parts of a
    Karmarkar-Karp partition by tokens, and the cap is not looked at again. Ranks ask in order here.
    Source: MindSpeed-RL, commit 05a90d77: ``mindspeed_rl/trainer/utils/transfer_dock.py``
    (``batch_seqlen_balance_sampler``, on with ``use_dp_batch_balance``), ``mindspeed_rl/utils/seqlen_balancing.py``
    (``heapq_partition``, ``heapq_partition_with_max``, ``rearrange_micro_batches``),
    ``mindspeed_rl/models/base/base_training_engine.py``. Its Karmarkar-Karp is verl's, so the wheel's is called.
    """
    with clock.driver():
        shares = _ask_in_turn(lengths, dp_size)
    size = len(lengths) // (dp_size * num_mini_batches)
    layout: MicroBatches = [[] for _ in range(dp_size)]
    with clock.ranks(dp_size):
        for start in range(0, size * num_mini_batches, size):
            minis = [share[start : start + size] for share in shares]
            count = max(_count_under_cap([lengths[row] for row in mini], max_token_len) for mini in minis)
            for rank, mini in enumerate(minis):
                parts = differencing([lengths[row] for row in mini], count)
                layout[rank].append([[mini[i] for i in part] for part in parts])
    return layout


def _ask_in_turn(lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    quota = len(lengths) // dp_size
    left = list(range(len(lengths)))
    shares: list[list[int]] = []
    for _ in range(dp_size - 1):
        share = _first_full(left, lengths, quota)
        shares.append(share)
        taken = set(share)
        left = [row for row in left if row not in taken]
    return [*shares, left]


def _first_full(rows: Sequence[int], lengths: Sequence[int], quota: int) -> list[int]:
    """Longest first to the lightest part; the part that is first to have ``quota`` rows."""
    parts: list[tuple[int, int, int]] = [(0, 0, part) for part in range(len(rows) // quota)]
    held: list[list[int]] = [[] for _ in parts]
    for row in sorted(rows, key=lambda row: (-lengths[row], -row)):
        tokens, count, part = parts[0]
        held[part].append(row)
        if count + 1 == quota:
            return sorted(held[part])
        heapq.heapreplace(parts, (tokens + lengths[row], count + 1, part))
    raise ValueError(f"quota must divide the {len(rows)} rows, got {quota}; pad the batch")


def _count_under_cap(lengths: Sequence[int], max_token_len: int) -> int:
    """Parts of a packing that, longest first, adds to the lightest part and closes it when the row does not fit."""
    open_parts = [0] * -(-sum(lengths) // max_token_len)
    closed = 0
    for length in sorted(lengths, reverse=True):
        if open_parts[0] + length > max_token_len:
            closed += 1
            heapq.heapreplace(open_parts, length)
        else:
            heapq.heapreplace(open_parts, open_parts[0] + length)
    return closed + len(open_parts)
