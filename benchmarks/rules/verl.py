"""verl 0.9.1: its v1 trainer, and the order of its legacy trainer. The wheel's own functions do the partitioning."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# verl is typed in part only.

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.clock import Clock
from benchmarks.verl_rule import MicroBatches, verl_micro_batches
from equipoise.errors import InfeasiblePlan


def balancing() -> Any:
    """The module of the wheel that partitions."""
    return importlib.import_module("verl.utils.seqlen_balancing")


def differencing(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Karmarkar-Karp into ``parts`` of any size, by the wheel; positions in ``weights``, the heaviest part first."""
    return balancing().karmarkar_karp(list(weights), k_partitions=parts, equal_size=False)


def deal(weights: Any, parts: int) -> list[list[int]]:
    """Karmarkar-Karp into ``parts`` of equal size, by the wheel; positions in ``weights``, in rising order."""
    return balancing().get_seqlen_balanced_partitions(weights, k_partitions=parts, equal_size=True)


def v1(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """The whole batch dealt to ranks, mini-batches cut from each rank's rows, each packed by the engine.

    Rows come from :func:`benchmarks.verl_rule.verl_micro_batches`. The time is taken apart from it: the driver's call
    as shipped, on a tensor of workloads, and the partitions that the engine of rank 0 computes.
    Source: verl 0.9.1, ``verl/trainer/ppo/v1/trainer_base.py`` and ``verl/utils/seqlen_balancing.py``.
    """
    layout = verl_micro_batches(
        lengths, dp_size=dp_size, num_mini_batches=num_mini_batches, max_token_len=max_token_len
    )
    shares = driver_time(lengths, dp_size, clock)
    size = len(lengths) // (dp_size * num_mini_batches)
    for j, mini in enumerate(zip(*layout, strict=True)):
        tokens = [sum(lengths[row] for micro in micros for row in micro) for micros in mini]
        first = min(size, -(-max(tokens) // max_token_len))
        mine = shares[0][j * size : (j + 1) * size]
        with clock.ranks(1):
            for count in range(first, len(mini[0]) + 1):
                _partition(mine, lengths, count)
    return layout


def driver_time(lengths: Sequence[int], dp_size: int, clock: Clock) -> list[list[int]]:
    """Time the deal of v1's driver as shipped (on a tensor); returns the shares."""
    import torch

    with clock.driver():
        workload = balancing().calculate_workload(torch.tensor(lengths, dtype=torch.int64))
        return deal(workload, dp_size)


def legacy(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """As v1, but each rank's rows are put in order of cost, the cheap ones at both ends, before mini-batches are cut.

    Source: verl 0.9.1, ``verl/trainer/ppo/ray_trainer.py``, ``_balance_batch`` as its only caller calls it.
    """
    with clock.driver():
        shares = [_cheap_at_both_ends(share, lengths) for share in driver_time(lengths, dp_size, Clock())]
    return _cut_and_pack(shares, lengths, num_mini_batches, max_token_len, clock)


def legacy_keep_minibatch(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """As ``legacy``, with each mini-batch dealt to ranks on its own (``keep_minibatch=True``).

    The order by cost that follows runs over all rows of a rank, so the mini-batches that are cut afterwards are others
    than those dealt. Source: verl 0.9.1, ``verl/trainer/ppo/ray_trainer.py``, ``_balance_batch``; nothing in the wheel
    passes ``keep_minibatch=True``.
    """
    size = len(lengths) // num_mini_batches
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    with clock.driver():
        for start in range(0, len(lengths), size):
            dealt = driver_time(lengths[start : start + size], dp_size, Clock())
            for share, rows in zip(shares, dealt, strict=True):
                share.extend(start + row for row in rows)
        shares = [_cheap_at_both_ends(share, lengths) for share in shares]
    return _cut_and_pack(shares, lengths, num_mini_batches, max_token_len, clock)


def pack_together(shares: Sequence[Sequence[int]], lengths: Sequence[int], max_token_len: int) -> list[list[list[int]]]:
    """[rank][micro-batch] of one mini-batch, as verl 0.9.1's engine packs it on all ranks together.

    From the largest ceiling of a rank's tokens over the cap on, the number of micro-batches grows by one until the
    partition of every rank is within the cap; then the cheap ones go to both ends.
    Source: verl 0.9.1, ``verl/utils/seqlen_balancing.py``, ``rearrange_micro_batches``.
    """
    count = max(min(len(share), -(-sum(lengths[row] for row in share) // max_token_len)) for share in shares)
    while True:
        if count > min(len(share) for share in shares):
            raise InfeasiblePlan(f"max_token_len must let all ranks use as many micro-batches, got {max_token_len}")
        packed = [_partition(share, lengths, count) for share in shares]
        tokens = [sum(lengths[row] for row in micro) for micros in packed for micro in micros]
        if max(tokens) <= max_token_len:
            return [_ends_light(micros, share, lengths) for micros, share in zip(packed, shares, strict=True)]
        count += 1


def _cut_and_pack(
    shares: list[list[int]], lengths: Sequence[int], num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    size = len(shares[0]) // num_mini_batches
    with clock.ranks(len(shares)):
        steps = [
            pack_together([share[start : start + size] for share in shares], lengths, max_token_len)
            for start in range(0, len(shares[0]), size)
        ]
    return [[step[rank] for step in steps] for rank in range(len(shares))]


def workload(length: int) -> int:
    """Cost of a row in verl's constants, in whole numbers."""
    return 24576 * length + length * length


def _partition(share: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    parts = balancing().get_seqlen_balanced_partitions([workload(lengths[row]) for row in share], count, False)
    return [[share[i] for i in part] for part in parts]


def _cheap_at_both_ends(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    rising = sorted(rows, key=lambda row: (lengths[row], row))
    return rising[::2] + list(reversed(rising[1::2]))


def _ends_light(micros: list[list[int]], share: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """The heaviest micro-batch in the middle, the others in turn to its left and right."""
    place = {row: i for i, row in enumerate(share)}
    falling = sorted(
        micros, key=lambda micro: (sum(workload(lengths[row]) for row in micro), place[micro[0]]), reverse=True
    )
    line: deque[list[int]] = deque()
    for i, micro in enumerate(falling):
        if i % 2:
            line.append(micro)
        else:
            line.appendleft(micro)
    return list(line)
