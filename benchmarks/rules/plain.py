"""No balancing: what a trainer does that takes the batch as it comes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.clock import Clock
from benchmarks.verl_rule import MicroBatches


def none(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """Contiguous mini-batches, contiguous shares, and micro-batches filled in order under the cap.

    Ranks with fewer micro-batches halve the one with most rows until all ranks have as many: under FSDP each
    micro-batch is a meeting of all ranks. Source: none; the base line that every trainer starts from.
    """
    size = len(lengths) // num_mini_batches
    share = size // dp_size
    layout: MicroBatches = [[] for _ in range(dp_size)]
    with clock.ranks(dp_size):
        for j in range(num_mini_batches):
            starts = [j * size + rank * share for rank in range(dp_size)]
            filled = [fill_in_order(range(start, start + share), lengths, max_token_len) for start in starts]
            count = max(len(micros) for micros in filled)
            for rank, micros in enumerate(filled):
                layout[rank].append(_halve_until(micros, count))
    return layout


def fill_in_order(rows: Sequence[int], lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    """Rows in order, a new micro-batch whenever the next row does not fit into the last one."""
    micros: list[list[int]] = []
    room = -1
    for row in rows:
        if lengths[row] > room:
            micros.append([])
            room = max_token_len
        micros[-1].append(row)
        room -= lengths[row]
    return micros


def _halve_until(micros: list[list[int]], count: int) -> list[list[int]]:
    while len(micros) < count:
        at = max(range(len(micros)), key=lambda m: len(micros[m]))
        half = len(micros[at]) // 2
        micros[at : at + 1] = [micros[at][:half], micros[at][half:]]
    return micros
