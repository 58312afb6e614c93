"""slime's rule, stated anew: pack first, deal afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.clock import Clock
from benchmarks.rules.verl import deal, differencing, workload
from benchmarks.verl_rule import MicroBatches
from equipoise.errors import InfeasiblePlan


def slime(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """Each mini-batch packed first-fit in order, the fullest micro-batches halved until ranks get equally many.

    The micro-batches are dealt to ranks by equal-size Karmarkar-Karp on their cost. slime's cost is the model's
    forward FLOPs; 24576·L + L² stands for it here.
    Source: slime, commit 624b824a (v0.3.1 and 38 commits): ``slime/utils/dp_schedule.py`` (``build_dp_schedule``) with
    ``--use-dynamic-batch-size --balance-data``, ``slime/utils/seqlen_balancing.py``. Its Karmarkar-Karp is verl's, so
    the wheel's is called.
    """
    return _schedule(lengths, dp_size, num_mini_batches, max_token_len, clock, by_cost=False)


def slime_by_flops(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """As ``slime``, but micro-batches come from Karmarkar-Karp on cost, which does not look at the cap.

    Source: as ``slime``, with ``--balance-by-flops``.
    """
    return _schedule(lengths, dp_size, num_mini_batches, max_token_len, clock, by_cost=True)


def _schedule(
    lengths: Sequence[int], dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock, *, by_cost: bool
) -> MicroBatches:
    size = len(lengths) // num_mini_batches
    layout: MicroBatches = [[] for _ in range(dp_size)]
    with clock.driver():
        for start in range(0, len(lengths), size):
            rows = range(start, start + size)
            micros = _by_cost(rows, lengths, max_token_len) if by_cost else _first_fit(rows, lengths, max_token_len)
            _halve_fullest(micros, -(-len(micros) // dp_size) * dp_size, lengths)
            costs = [sum(workload(lengths[row]) for row in micro) for micro in micros]
            for rank, mine in enumerate(deal(costs, dp_size)):
                layout[rank].append([micros[m] for m in mine])
    return layout


def _first_fit(rows: Sequence[int], lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    micros: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        length = lengths[row]
        at = next((m for m, left in enumerate(room) if length <= left), None)
        if at is None:
            micros.append([row])
            room.append(max_token_len - length)
        else:
            micros[at].append(row)
            room[at] -= length
    return micros


def _by_cost(rows: Sequence[int], lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    count = max(1, -(-sum(lengths[row] for row in rows) // max_token_len))
    if count >= len(rows):
        return [[row] for row in rows]
    return [sorted(rows[i] for i in part) for part in differencing([workload(lengths[row]) for row in rows], count)]


def _halve_fullest(micros: list[list[int]], count: int, lengths: Sequence[int]) -> None:
    """Grow ``micros`` to ``count``: the fullest that has two rows is dealt, longest first, to two halves."""
    tokens = [sum(lengths[row] for row in micro) for micro in micros]
    while len(micros) < count:
        at = max(range(len(micros)), key=lambda m: (len(micros[m]) > 1, tokens[m], m))
        if len(micros[at]) < 2:
            raise InfeasiblePlan(f"a mini-batch must have {count} rows or more, got {len(micros)}; use fewer ranks")
        halves: list[list[int]] = [[], []]
        sums = [0, 0]
        for row in sorted(micros[at], key=lambda row: -lengths[row]):
            half = int(sums[0] > sums[1])
            halves[half].append(row)
            sums[half] += lengths[row]
        micros[at], tokens[at] = halves[0], sums[0]
        micros.append(halves[1])
        tokens.append(sums[1])
