"""TransferQueue's sampler, the installed one, with verl's engine behind it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# TransferQueue is typed in part only.

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from benchmarks.clock import Clock
from benchmarks.rules.verl import pack_together
from benchmarks.verl_rule import MicroBatches


class _Lengths:
    """What the sampler asks the controller's partition for: the tokens of rows."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def get_custom_meta(self, rows: Sequence[int]) -> dict[int, dict[str, int]]:
        return {row: {"total_lengths": self._lengths[row]} for row in rows}


def transfer_queue(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
) -> MicroBatches:
    """Each mini-batch dealt to ranks by equal-size Karmarkar-Karp on tokens; micro-batches as verl's engine makes them.

    The sampler stops at the ranks, so what comes after is its user's; verl's engine is taken. Rows are asked for one
    mini-batch at a time and count as prompts of one rollout each.
    Source: TransferQueue 0.1.11, ``transfer_queue/sampler/seqlen_balanced_sampler.py``, called as its controller does.
    """
    module: Any = importlib.import_module("transfer_queue.sampler")
    size = len(lengths) // num_mini_batches
    partition = _Lengths(lengths)
    layout: MicroBatches = [[] for _ in range(dp_size)]
    with clock.driver():
        sampler = module.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=dp_size)
        steps: list[list[list[int]]] = [
            [
                sampler.sample(
                    list(range(j * size, (j + 1) * size)),
                    size // dp_size,
                    task_name="bench",
                    partition_id="bench",
                    dp_rank=rank,
                    batch_index=j,
                    partition=partition,
                )[0]
                for rank in range(dp_size)
            ]
            for j in range(num_mini_batches)
        ]
    with clock.ranks(dp_size):
        for shares in steps:
            for rank, micros in enumerate(pack_together(shares, lengths, max_token_len)):
                layout[rank].append(micros)
    return layout
