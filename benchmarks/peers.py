"""The rules of peers, each a function from lengths to row ids by rank, mini-batch and micro-batch.

Where a peer's functions are installed (verl, TransferQueue) they are called; the others are stated anew in
``benchmarks/rules``, where each docstring names its source. ``docs/peers.md`` compares the peers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.clock import Clock
from benchmarks.rules import areal, mindspeed, plain, slime, transfer_queue, verl
from benchmarks.verl_rule import MicroBatches


class Rule(Protocol):
    """How a peer lays out one step."""

    def __call__(
        self, lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int, clock: Clock
    ) -> MicroBatches:
        """Row ids as [rank][mini-batch][micro-batch], with each row once.

        Args:
            lengths: tokens of each row, shape (n,); n is a multiple of ``dp_size * num_mini_batches``.
            dp_size: data-parallel ranks.
            num_mini_batches: optimizer steps of the batch.
            max_token_len: tokens that a micro-batch of one rank may hold.
            clock: takes the time of the driver's part and of the ranks' part.

        """
        ...


PEERS: dict[str, Rule] = {
    "none": plain.none,
    "verl": verl.v1,
    "verl legacy": verl.legacy,
    "verl legacy, keep_minibatch": verl.legacy_keep_minibatch,
    "AReaL": areal.areal,
    "MindSpeed-RL": mindspeed.mindspeed_rl,
    "TransferQueue": transfer_queue.transfer_queue,
    "slime": slime.slime,
    "slime by FLOPs": slime.slime_by_flops,
}
