"""How many rows a batch needs before a trainer can cut it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from equipoise._checks import positive
from equipoise.errors import InvalidInput, must


def required_batch_multiple(dp_size: int, mini_batch_sizes: Iterable[int] = ()) -> int:
    """Least common multiple of the data-parallel size and each role's mini-batch, in rows.

    A batch of that many rows, or a multiple of it, divides into equal ranks and whole mini-batches of every role.

    Args:
        dp_size: number of data-parallel ranks (not the world size: tensor and pipeline ranks share their rows).
        mini_batch_sizes: rows of one optimizer step of each role (prompts × rollouts).

    Raises:
        InvalidInput: a size is below 1, or a mini-batch that ``dp_size`` does not divide.

    >>> required_batch_multiple(8, [64 * 4, 48 * 4])
    768

    """
    ranks = positive("dp_size", dp_size, "pass the number of data-parallel ranks")
    sizes = [positive("mini_batch_sizes", size, "pass prompts × rollouts") for size in mini_batch_sizes]
    for size in sizes:
        if size % ranks:
            legal = max(ranks, size - size % ranks)
            raise InvalidInput(
                must(
                    "mini_batch_sizes",
                    f"be multiples of dp_size = {ranks}, so that each rank gets as many rows of a mini-batch",
                    size,
                    f"use {legal} or {size + ranks - size % ranks} rows",
                )
            )
    return math.lcm(ranks, *sizes)
