"""How many rows a batch needs so that a trainer can split it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

from equipoise._checks import of_kind, positive
from equipoise.errors import InvalidInput, must, nearest

PaddingRule = Literal["lcm", "steps"]


def required_batch_multiple(dp_size: int, mini_batch_sizes: Iterable[int] = ()) -> int:
    """Least common multiple of the data-parallel size and each role's mini-batch, in rows.

    A batch with a multiple of that many rows divides into equal ranks and whole mini-batches for every role.

    Args:
        dp_size: number of data-parallel ranks (not the world size: tensor and pipeline ranks share their rows).
        mini_batch_sizes: rows of one optimizer step of each role (prompts × rollouts).

    Raises:
        InvalidInput: a size is below 1, or ``dp_size`` does not divide a mini-batch.

    >>> required_batch_multiple(8, [64 * 4, 48 * 4])
    768
    """
    ranks = positive("dp_size", dp_size, "pass the number of data-parallel ranks")
    of_kind("mini_batch_sizes", mini_batch_sizes, Iterable, "pass a list, one size per role")
    sizes = [positive("mini_batch_sizes", size, "pass prompts × rollouts") for size in mini_batch_sizes]
    for size in sizes:
        if size % ranks:
            legal = max(ranks, size - size % ranks)
            rule = f"be multiples of dp_size = {ranks}, so that each rank gets as many rows of a mini-batch"
            remedy = f"use {legal} or {size + ranks - size % ranks} rows"
            raise InvalidInput(must("mini_batch_sizes", rule, size, remedy))
    return math.lcm(ranks, *sizes)


def padded_batch_size(
    num_rows: int,
    *,
    dp_size: int,
    mini_batch_sizes: Iterable[int] = (),
    num_steps: int | None = None,
    rule: PaddingRule = "lcm",
) -> int:
    """Rows of a batch after padding, so that a trainer can split it.

    * "lcm": the next multiple of :func:`required_batch_multiple`. Mini-batches keep their size, and the number of
      optimizer steps depends on the rows.
    * "steps": the next multiple of dp_size × num_steps. The number of optimizer steps is fixed, and the size of
      mini-batches depends on the rows: this needs less padding for a few extra rows.

    Args:
        num_rows: real rows, at least 1.
        dp_size: number of data-parallel ranks.
        mini_batch_sizes: with rule "lcm", rows per optimizer step of each role.
        num_steps: with rule "steps", optimizer steps per batch, at most ``num_rows``.
        rule: "lcm" or "steps".

    Returns:
        At least ``num_rows``.

    Raises:
        InvalidInput: a value breaks its rule, or belongs to the other rule.

    >>> padded_batch_size(298, dp_size=2, mini_batch_sizes=[128])
    384
    >>> padded_batch_size(298, dp_size=2, num_steps=2, rule="steps")
    300
    """
    rows = positive("num_rows", num_rows, "skip the step when the batch is empty")
    if rule not in get_args(PaddingRule):
        known = get_args(PaddingRule)
        raise InvalidInput(must("rule", f"be one of {list(known)}", rule, nearest(str(rule), known)))
    sizes = list(mini_batch_sizes)
    if rule == "lcm":
        if num_steps is not None:
            remedy = 'leave it out or use rule="steps"'
            raise InvalidInput(must("num_steps", 'be None with rule="lcm"', num_steps, remedy))
        unit = required_batch_multiple(dp_size, sizes)
    else:
        if sizes:
            remedy = 'leave them out or use rule="lcm"'
            raise InvalidInput(must("mini_batch_sizes", 'be empty with rule="steps"', sizes, remedy))
        ranks = positive("dp_size", dp_size, "pass the number of data-parallel ranks")
        steps = positive("num_steps", num_steps, "pass the optimizer steps of the batch")
        if steps > rows:
            text = f"be at most num_rows = {rows}, so that each optimizer step has a real row"
            raise InvalidInput(must("num_steps", text, steps, f"use {rows} or fewer"))
        unit = ranks * steps
    return -(-rows // unit) * unit
