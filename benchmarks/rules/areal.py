"""AReaL's rule, stated anew."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.clock import Clock
from benchmarks.verl_rule import MicroBatches
from equipoise.errors import InfeasiblePlan


def areal(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """Longest first to the lightest rank, by tokens and with equal counts; then each rank cuts and packs by itself.

    A rank spreads its rows over mini-batches by the packing rule without a cap, then packs each mini-batch under it.
    Ranks gather their counts and all pack again with the largest as a floor, until all agree.
    Source: AReaL, commit cbff54d6 (v2.0.0 and 55 commits): ``areal/infra/controller/train_controller.py``
    (``_dispatch_tensors``), ``areal/utils/seqpack.py`` (``balanced_greedy_partition``, ``ffd_allocate``),
    ``areal/utils/data.py`` (``allocate_balanced_mbs_synced``), ``areal/trainer/ppo/actor.py`` (mini-batches). The
    default packing, "ffd".
    """
    with clock.driver():
        shares = _longest_to_lightest(lengths, dp_size)
    no_cap = sum(lengths)
    with clock.ranks(dp_size):
        minis = [_pack(share, lengths, no_cap, num_mini_batches) for share in shares]
        steps = [_agree(list(step), lengths, max_token_len) for step in zip(*minis, strict=True)]
    return [[step[rank] for step in steps] for rank in range(dp_size)]


def _longest_to_lightest(lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    quota = len(lengths) // dp_size
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    open_ranks = [(0, rank) for rank in range(dp_size)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, rank = heapq.heappop(open_ranks)
        shares[rank].append(row)
        if len(shares[rank]) < quota:
            heapq.heappush(open_ranks, (tokens + lengths[row], rank))
    return shares


def _agree(shares: list[list[int]], lengths: Sequence[int], max_token_len: int) -> list[list[list[int]]]:
    floor = 1
    while True:
        packed = [_pack(share, lengths, max_token_len, floor) for share in shares]
        counts = {len(micros) for micros in packed}
        if len(counts) == 1:
            return packed
        floor = max(counts)


def _pack(share: Sequence[int], lengths: Sequence[int], max_token_len: int, floor: int) -> list[list[int]]:
    """First ``floor`` bins with one row each; then, longest first, into the bin with fewest rows that has room."""
    if len(share) < floor:
        raise InfeasiblePlan(f"a rank must have a row for each of {floor} micro-batches, got {len(share)}")
    bins: list[list[int]] = []  # places in `share`
    loads: list[int] = []
    for place in sorted(range(len(share)), key=lambda place: -lengths[share[place]]):
        length = lengths[share[place]]
        fits = [b for b, load in enumerate(loads) if load + length <= max_token_len]
        if len(bins) < floor or not fits:
            bins.append([place])
            loads.append(length)
        else:
            best = min(fits, key=lambda b: (len(bins[b]), loads[b]))
            bins[best].append(place)
            loads[best] += length
    return [[share[place] for place in places] for places in sorted(sorted(places) for places in bins)]
