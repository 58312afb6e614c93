"""Which numbers of rows compute each row bitwise equally, shown by sums that leave only their rounding."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# torch's modules are typed in part only.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

LEAST_ROWS = 4
"""Fewer rows never run: libraries have special paths for one or two rows, and all weights are read anyway."""
DRAWS = 4
"""Sets of inputs per shape, because another summation order may not show in a single output of one set."""


def linear_sizes(model: torch.nn.Module, sizes: Sequence[int]) -> set[int]:
    r"""Sizes at which every linear layer of ``model`` sums as it does at the largest.

    Each shape runs with inputs and weights for which :math:`\sum_k x_k w_k = 0`: terms come in pairs of opposite sign
    at random positions, over a wide range of magnitudes. The results are pure rounding errors, so another summation
    order changes leading digits, which rounding to half precision cannot hide. Every row and draw has its own
    magnitudes, so that even an order that differs in a single output shows.
    """
    agreeing, rows = set(sizes), max(sizes)
    for inputs, outputs, dtype, biased in sorted(_linear_shapes(model), key=str):
        device = next(model.parameters()).device
        x, weight = null_sums(DRAWS * rows, inputs, outputs, dtype)
        weight = weight.to(device)
        bias = torch.zeros(outputs, dtype=dtype, device=device) if biased else None
        for drawn in x.to(device)[:, None].split(rows):
            want = functional.linear(drawn, weight, bias)
            agreeing = {
                size
                for size in agreeing
                if all(
                    torch.equal(functional.linear(drawn[places], weight, bias), want[places])
                    for places in _places(rows, size)
                )
            }
    return agreeing


def null_sums(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (rows, inputs) and weights (outputs, inputs) whose products are 0 except for rounding; deterministic.

    Inputs span 22 powers of 2: wide enough that float32 rounds sums of half-precision products, which are exact in it,
    and narrow enough that float16 can represent both the sums and their rounding errors.

    >>> x, weight = null_sums(4, 6, 3, torch.float64)
    >>> bool(((x @ weight.T).abs() < 1e-10).all())
    True
    """
    draws = torch.Generator().manual_seed(inputs + outputs)
    half = inputs // 2
    first, second = torch.randperm(inputs, generator=draws)[: 2 * half].reshape(2, half)
    x = torch.zeros(rows, inputs)
    magnitudes = torch.exp2(22 * torch.rand(rows, half, generator=draws) - 14)
    x[:, first] = torch.randn(rows, half, generator=draws) * magnitudes
    x[:, second] = -x[:, first]
    weight = torch.randn(outputs, inputs, generator=draws)
    weight[:, second] = weight[:, first]
    return x.to(dtype), weight.to(dtype)


def _linear_shapes(model: torch.nn.Module) -> set[tuple[int, int, torch.dtype, bool]]:
    found: set[tuple[int, int, torch.dtype, bool]] = set()
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            bias: Any = part.bias
            found.add((part.in_features, part.out_features, part.weight.dtype, bias is not None))
    return found


def _places(rows: int, size: int) -> Iterator[torch.Tensor]:
    """The first rows in order, and rows from everywhere in another order."""
    yield torch.arange(size)
    yield torch.randperm(rows, generator=torch.Generator().manual_seed(size))[:size]
