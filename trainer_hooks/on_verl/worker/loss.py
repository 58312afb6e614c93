"""``equipoise.loss=exact``: masked values and a batch's width do not affect verl's loss or its gradient.

It takes two changes. :func:`aggregate` replaces verl's aggregation with :func:`equipoise.agg_loss`, which selects the
tokens that count, where verl multiplies by the mask and, in one mode, divides by the width. That alone does not stop a
NaN or an infinity in the inputs of a loss: the gradient of ``exp(log_prob - old)`` is 0 · NaN there. So
:func:`exact_loss` replaces masked values with 0 before verl computes with them: in the columns that the loss reads, and
in the model's outputs (:func:`select`), whose gradient is then exactly 0 at those tokens.

This cannot help a model whose own activations are NaN or infinite at a masked token: the gradient of its weights is a
sum over tokens of gradient × activation, and 0 · NaN is NaN. Metrics that verl computes on the driver
(``actor/entropy``) stay verl's.
"""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

_COLUMNS = ("old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob", "values", "returns")
_exact: ContextVar[bool] = ContextVar("equipoise_exact_loss", default=False)


def exact_loss(original: Callable[..., Any], config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Verl's ``ppo_loss`` or ``value_loss``, on unmasked values only."""
    mask = data["response_mask"]
    data = data.copy()
    for name in _COLUMNS:
        column = data.get(name, None)
        if column is not None:
            data[name] = _selected(column, mask)
    token = _exact.set(True)
    try:
        return original(config, model_output, data, dp_group)
    finally:
        _exact.reset(token)


def select(original: Callable[..., Any], tensor: torch.Tensor, data: Any) -> torch.Tensor:
    """Verl's ``no_padding_2_padding``; in an exact loss, masked tokens become 0 and get gradient 0."""
    found: torch.Tensor = original(tensor, data)
    if not _exact.get():
        return found
    mask = data["response_mask"]
    if mask.is_nested:
        mask = mask.to_padded_tensor(0)
    mask = torch.nn.functional.pad(mask, (0, found.shape[1] - mask.shape[1]))
    return _where(mask, found)


def aggregate(
    original: Callable[..., Any],
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    *counts: Any,
    **named: Any,
) -> torch.Tensor:
    """Verl's ``agg_loss``; in an exact loss :func:`equipoise.agg_loss`, which takes the same arguments."""
    if not _exact.get():
        return original(loss_mat, loss_mask, loss_agg_mode, *counts, **named)
    from equipoise.training.loss import agg_loss

    return agg_loss(loss_mat, loss_mask, loss_agg_mode, *counts, **named)


def _selected(column: Any, mask: Any) -> torch.Tensor:
    if not column.is_nested:
        return _where(mask.to_padded_tensor(0) if mask.is_nested else mask, column)
    values, lengths = _where(mask.values(), column.values()), column.offsets().diff()
    # without a maximum length, verl's padding would use the sum of all
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=column.offsets(), min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )


def _where(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    chosen = mask.bool().reshape(*mask.shape, *[1] * (values.dim() - mask.dim()))
    return torch.where(chosen, values, torch.zeros((), dtype=values.dtype, device=values.device))
