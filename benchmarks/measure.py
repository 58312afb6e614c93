"""One measure for every planner: row ids in, figures out. It knows nothing of how the rows were laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.verl_rule import MicroBatches

LINEAR = 24576
QUADRATIC = 1


class BrokenLayout(ValueError):
    """A layout that leaves a row out, or has one twice."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a layout costs.

    Attributes:
        lockstep: Σ over mini-batches and micro-batches of the largest cost of a rank, over ``bound``.
        rank: Σ over mini-batches of the largest total of a rank, over ``bound``.
        own_bound: the bound of the layout's own mini-batches, over ``bound``; below 1 where a planner that regroups
            rows put several of the longest into one mini-batch.
        num_micro_batches: micro-batches of the rank that has most, over all mini-batches.
        least: no layout of the batch's own mini-batches has fewer.
        rows_over: rows in micro-batches above the cap.
        fullest: tokens of the fullest micro-batch over the cap.
        keeps: whether its mini-batches are those of the batch as it came.
        row_spread: most rows that a rank has more than another in one mini-batch.
        ragged: mini-batches in which ranks have different numbers of micro-batches.

    """

    lockstep: float
    rank: float
    own_bound: float
    num_micro_batches: int
    least: int
    rows_over: int
    fullest: float
    keeps: bool
    row_spread: int
    ragged: int


def measure(layout: MicroBatches, lengths: Sequence[int], *, num_mini_batches: int, max_token_len: int) -> Figures:
    r"""Figures of ``layout``, with the cost :math:`24576 L + L^2` of a row.

    The bound is :math:`\sum_j \max(\text{mean cost of a rank}, \text{cost of the longest row})` over the mini-batches
    of the batch as it came, cut into equal blocks: one and the same for all planners, whatever mini-batches they make.

    Args:
        layout: row ids as [rank][mini-batch][micro-batch].
        lengths: tokens of each row, shape (n,).
        num_mini_batches: optimizer steps of the batch.
        max_token_len: tokens that a micro-batch of one rank may hold.

    Raises:
        BrokenLayout: a row is missing or there twice.

    """
    tokens = np.asarray(lengths, dtype=np.int64)
    cost = tokens * (LINEAR + QUADRATIC * tokens)
    seen = sorted(row for rank in layout for mini in rank for micro in mini for row in micro)
    if seen != list(range(tokens.size)):
        raise BrokenLayout(f"layout must hold each of {tokens.size} rows once, got {len(seen)}; fix the planner")
    dp_size = len(layout)
    blocks = np.split(np.arange(tokens.size), num_mini_batches)
    bound = sum(_bound(cost[block], dp_size) for block in blocks)
    lockstep = rank = own = 0.0
    most = np.zeros(dp_size, dtype=np.int64)
    ragged = row_spread = 0
    keeps = True
    for block, mini in zip(blocks, zip(*layout, strict=True), strict=True):
        rows = [[row for micro in micros for row in micro] for micros in mini]
        counts = np.array([len(micros) for micros in mini])
        loads = np.zeros((dp_size, counts.max()))
        for r, micros in enumerate(mini):
            loads[r, : len(micros)] = [cost[micro].sum() for micro in micros]
        lockstep += float(loads.max(axis=0).sum())
        rank += float(loads.sum(axis=1).max())
        members = [row for mine in rows for row in mine]
        own += _bound(cost[members], dp_size)
        keeps &= set(members) == set(block.tolist())
        row_spread = max(row_spread, max(map(len, rows)) - min(map(len, rows)))
        ragged += int(counts.min() < counts.max())
        most += counts
    over, fullest = _over(layout, tokens, max_token_len)
    return Figures(
        lockstep=lockstep / bound,
        rank=rank / bound,
        own_bound=own / bound,
        num_micro_batches=int(most.max()),
        least=sum(_least(tokens[block], dp_size, max_token_len) for block in blocks),
        rows_over=over,
        fullest=fullest,
        keeps=keeps,
        row_spread=row_spread,
        ragged=ragged,
    )


def _bound(cost: npt.NDArray[np.int64], dp_size: int) -> float:
    return max(float(cost.sum()) / dp_size, float(cost.max()))


def _least(tokens: npt.NDArray[np.int64], dp_size: int, max_token_len: int) -> int:
    """Fewest micro-batches of a rank: all tokens must fit, and no two rows above half of the cap fit together."""
    by_tokens = -(-int(tokens.sum()) // (dp_size * max_token_len))
    by_rows = -(-int((2 * tokens > max_token_len).sum()) // dp_size)
    return max(by_tokens, by_rows, 1)


def _over(layout: MicroBatches, tokens: npt.NDArray[np.int64], max_token_len: int) -> tuple[int, float]:
    rows, fullest = 0, 0
    for micro in (micro for rank in layout for mini in rank for micro in mini):
        held = int(tokens[micro].sum())
        fullest = max(fullest, held)
        rows += len(micro) if held > max_token_len else 0
    return rows, fullest / max_token_len
