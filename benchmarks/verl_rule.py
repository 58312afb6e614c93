"""The micro-batches that verl 0.9.1 itself would make of a step, computed by its own functions from the lengths alone.

verl decides in two places. Its trainer deals the whole batch to the ranks (``PPOTrainer._balance_batch``,
``verl/trainer/ppo/v1/trainer_base.py``), each rank cuts its share into mini-batches in the order in which it came, and
its engine packs each mini-batch (``rearrange_micro_batches``, ``verl/utils/seqlen_balancing.py``). Here both run in one
process; only what they agree over the ranks is stood in for, by a loop over the ranks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# verl and tensordict are typed in part only.

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Generator, Sequence
from typing import Any

from equipoise.errors import InfeasiblePlan, InvalidInput, must

MicroBatches = list[list[list[list[int]]]]
"""[rank][mini-batch][micro-batch] -> row ids in the caller's numbering."""


def verl_micro_batches(
    lengths: Sequence[int], *, dp_size: int, num_mini_batches: int, max_token_len: int
) -> MicroBatches:
    r"""What verl 0.9.1 would run for rows of ``lengths``, with dynamic batch size and one epoch in order.

    verl asks for the smallest common count :math:`k \ge \max_r k_r^0` of micro-batches at which the packing of every
    rank is within the cap, with :math:`k_r^0` the ceiling of a rank's tokens over the cap. Without a process group its
    function returns, for one rank, the smallest such count from a given one on; raising all ranks to the largest answer
    until they agree gives the same number.

    Args:
        lengths: (n,) tokens of each row of the padded batch, in the order in which it comes.
        dp_size: data-parallel ranks.
        num_mini_batches: optimizer steps of the batch.
        max_token_len: tokens that a micro-batch of one rank may hold.

    Returns:
        Row ids by rank, mini-batch and micro-batch, in the order in which verl would run them.

    Raises:
        InvalidInput: when the rows do not divide into ranks and mini-batches; verl pads a batch until they do.
        InfeasiblePlan: when verl would raise: a row above the cap, or no common count that fits.

    >>> verl_micro_batches([5, 4, 3, 2], dp_size=2, num_mini_batches=1, max_token_len=7)
    [[[[0, 3]]], [[[1, 2]]]]

    """
    import torch

    rows = [int(length) for length in lengths]
    if min(dp_size, num_mini_batches) < 1 or not rows or len(rows) % (dp_size * num_mini_batches):
        raise InvalidInput(
            must(
                "lengths",
                f"have a positive multiple of dp_size * num_mini_batches = {dp_size} * {num_mini_batches} rows",
                len(rows),
                "pad the batch as verl does",
            )
        )
    if max(rows) > max_token_len:
        raise InfeasiblePlan(
            must("max_token_len", f"be at least the longest row, {max(rows)} tokens", max_token_len, "raise the cap")
        )
    size = len(rows) // (dp_size * num_mini_batches)
    with _quiet():
        verl = _balancing()
        workload: list[int] = verl.calculate_workload(torch.tensor(rows, dtype=torch.int64)).tolist()
        shares: list[list[int]] = verl.get_seqlen_balanced_partitions(workload, k_partitions=dp_size, equal_size=True)
        steps = [
            _agree([share[start : start + size] for share in shares], rows, max_token_len)
            for start in range(0, size * num_mini_batches, size)
        ]
    return [[step[rank] for step in steps] for rank in range(dp_size)]


def _balancing() -> Any:
    """The module of verl that both rules live in."""
    return importlib.import_module("verl.utils.seqlen_balancing")


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keeps to itself what verl and torch log about a machine without an accelerator."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _agree(shares: list[list[int]], lengths: list[int], max_token_len: int) -> list[list[list[int]]]:
    """[rank][micro-batch] of one mini-batch, at the smallest count that every rank can pack."""
    count = 1
    while True:
        packed = [_pack(share, lengths, max_token_len, count) for share in shares]
        counts = {len(groups) for groups in packed}
        if len(counts) == 1:
            return packed
        count = max(counts)


def _pack(share: list[int], lengths: list[int], max_token_len: int, at_least: int) -> list[list[int]]:
    """One rank's rows as verl packs them into ``at_least`` or, where that does not fit, more micro-batches."""
    import torch
    from tensordict import TensorDict

    edges = torch.tensor([0, *(lengths[row] for row in share)]).cumsum(0)
    tokens = torch.nested.nested_tensor_from_jagged(torch.zeros(int(edges[-1]), dtype=torch.uint8), edges)
    batch = TensorDict({"input_ids": tokens}, batch_size=[len(share)])
    try:
        _, groups = _balancing().rearrange_micro_batches(batch, max_token_len, min_num_micro_batch=at_least)
    except ValueError as error:
        raise InfeasiblePlan(
            must("max_token_len", f"let {len(share)} rows fit in as many micro-batches", max_token_len, str(error))
        ) from error
    return [[share[i] for i in group] for group in groups]


def lockstep_cost(micro_batches: MicroBatches, lengths: Sequence[int], *, linear: float, quadratic: float) -> float:
    r"""What a step costs where ranks meet at every micro-batch: :math:`\sum_{j,m} \max_r \sum_i a L_i + b L_i^2`.

    Args:
        micro_batches: row ids by rank, mini-batch and micro-batch.
        lengths: (n,) tokens of each row.
        linear: a, cost of a token.
        quadratic: b, cost of a pair of tokens.

    >>> lockstep_cost([[[[0, 3]]], [[[1, 2]]]], [5, 4, 3, 2], linear=1.0, quadratic=0.0)
    7.0

    """
    cost = [linear * length + quadratic * float(length) ** 2 for length in lengths]
    return float(
        sum(
            max(sum(cost[row] for row in micro) for micro in meeting)
            for step in zip(*micro_batches, strict=True)
            for meeting in zip(*step, strict=True)
        )
    )
