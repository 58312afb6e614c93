"""Sum over local tokens ÷ global count × dp: the same loss and gradient for any ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from equipoise._checks import positive
from equipoise.errors import InvalidInput, must, nearest
from equipoise.training.loss.sequences import Sequences, flat, numbers_of_rows, sequences_of

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
    *,
    segment_ids: torch.Tensor | None = None,
    is_padding: Any = None,
) -> torch.Tensor:
    """One micro-batch's share of a mini-batch loss, with the arguments of verl 0.9.1's ``core_algos.agg_loss``.

    Shares add up over micro-batches; their mean over ranks, which data-parallel engines compute, is the loss::

        token-mean               dp · Σ_tokens loss / batch_num_tokens
        token-sum                dp · Σ_tokens loss
        seq-mean-token-sum       dp · Σ_rows Σ_tokens loss / global_batch_size
        seq-mean-token-mean      dp · Σ_rows mean_tokens loss / global_batch_size
        seq-mean-token-sum-norm  dp · Σ_rows Σ_tokens loss / (global_batch_size · loss_scale_factor)

    Masked positions are dropped first, so NaN or infinity there changes neither value nor gradient. If no token counts,
    the share is 0 with a gradient of exactly 0, and it is still attached to the graph.

    Args:
        loss_mat: loss of each token, shape (rows, width), or jagged like the mask.
        loss_mask: nonzero where a token counts, shape (rows, width), or jagged.
        loss_agg_mode: one of the five above.
        dp_size: data-parallel ranks whose gradients are averaged.
        batch_num_tokens: tokens under the mask in the whole mini-batch; None for those of this call, on one rank.
        global_batch_size: real rows (sequences) in the whole mini-batch; None for the rows of this call with a token
            under the mask, on one rank.
        loss_scale_factor: constant horizon of the norm mode.
        segment_ids: for rows with several sequences, shape (rows, width): equal within a sequence, 0 for none. A "row"
            in the formulas is then a sequence.
        is_padding: shape (rows,); True for rows to exclude whatever their mask.

    Returns:
        A scalar.

    Raises:
        InvalidInput: the mode is unknown, a global count or horizon is missing, or shapes differ.

    >>> loss, mask = torch.tensor([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> float(agg_loss(loss, mask, "token-mean")), float(agg_loss(loss, mask, "seq-mean-token-mean"))
    (3.5999999046325684, 3.25)
    """
    sequences = sequences_of(loss_mask, segment_ids=segment_ids, is_padding=is_padding)
    return aggregate(
        flat(loss_mat, loss_mask, "loss_mat"),
        sequences,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )


def aggregate(
    loss_mat: torch.Tensor,
    sequences: Sequences,
    loss_agg_mode: str,
    *,
    dp_size: int,
    batch_num_tokens: int | None,
    global_batch_size: int | None,
    loss_scale_factor: float | None,
) -> torch.Tensor:
    """:func:`agg_loss` of a loss matrix whose tokens and sequences are known."""
    if loss_agg_mode not in MODES:
        raise InvalidInput(
            must("loss_agg_mode", f"be one of {list(MODES)}", loss_agg_mode, nearest(str(loss_agg_mode), MODES))
        )
    positive("dp_size", dp_size, "use 1 without data parallelism")
    losses = sequences.select(loss_mat)
    if loss_agg_mode.startswith("token"):
        total = losses.sum() * dp_size
        if loss_agg_mode == "token-sum":
            return total
        return total / _count("batch_num_tokens", batch_num_tokens, dp_size, sequences.chosen.sum())
    per_sequence, tokens = sequences.sum(losses), sequences.num_tokens()
    rows = _count("global_batch_size", global_batch_size, dp_size, (tokens > 0).sum())
    if loss_agg_mode == "seq-mean-token-mean":
        per_sequence = per_sequence / tokens.clamp(min=1)
    total = per_sequence.sum() * dp_size / rows
    if loss_agg_mode != "seq-mean-token-sum-norm":
        return total
    if loss_scale_factor is None or not 0 < loss_scale_factor < float("inf"):
        rule = "be a constant above 0 with seq-mean-token-sum-norm"
        remedy = "set the response length limit; the width of a batch would change the loss with its padding"
        raise InvalidInput(must("loss_scale_factor", rule, loss_scale_factor, remedy))
    return total / loss_scale_factor


def local_mean(loss_mat: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of this call alone: ``Σ_tokens loss / tokens``.

    For inspection only. It is not a share of a mini-batch loss: the mean of such means over micro-batches or ranks of
    unequal size is a different loss, which changes with the plan.

    Args:
        loss_mat: loss of each token, shape (rows, width), or jagged like the mask.
        loss_mask: nonzero where a token counts.

    Returns:
        A scalar; 0 where no token counts.

    >>> float(local_mean(torch.tensor([[0.5, 9.0]]), torch.tensor([[1, 0]])))
    0.5
    """
    sequences = sequences_of(loss_mask)
    return sequences.select(flat(loss_mat, loss_mask, "loss_mat")).sum() / sequences.chosen.sum().clamp(min=1)


def group_mean(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    dp_size: int = 1,
    group_num_tokens: torch.Tensor | None = None,
    is_padding: Any = None,
) -> torch.Tensor:
    """One micro-batch's share of a loss in which all groups have the same weight, however many tokens they have.

    ::

        dp · Σ_groups (Σ_tokens of the group loss / tokens of the group) / groups

    Args:
        loss_mat: loss of each token, shape (rows, width), or jagged like the mask.
        loss_mask: nonzero where a token counts.
        group_ids: index of each row's group, from 0, shape (rows,).
        dp_size: data-parallel ranks whose gradients are averaged.
        group_num_tokens: tokens under the mask of each group in the whole mini-batch, shape (groups,); None for those
            of this call, on one rank. Groups without a token do not count.
        is_padding: shape (rows,); True for rows to exclude whatever their mask.

    Returns:
        A scalar; 0 where no token counts.

    Raises:
        InvalidInput: there is more than one rank but no global counts, or shapes differ.

    >>> loss = torch.cat([torch.ones(1, 10), torch.zeros(1, 10)])
    >>> float(group_mean(loss, torch.ones(2, 10), torch.tensor([0, 1])))
    0.5
    """
    if group_ids.shape != loss_mask.shape[:1] or group_ids.is_floating_point():
        rule = f"be whole numbers of shape {tuple(loss_mask.shape[:1])}"
        raise InvalidInput(must("group_ids", rule, tuple(group_ids.shape), "pass one per row"))
    sequences = sequences_of(loss_mask, is_padding=is_padding)
    losses = sequences.select(flat(loss_mat, loss_mask, "loss_mat"))
    group = numbers_of_rows(group_ids, loss_mask).flatten()
    if group_num_tokens is None:
        if dp_size > 1:
            remedy = "count each group's tokens over all ranks"
            raise InvalidInput(must("group_num_tokens", f"be given with dp_size = {dp_size}", None, remedy))
        num_groups = int(group_ids.max()) + 1 if group_ids.numel() else 0
        zeros = torch.zeros(num_groups, dtype=torch.long, device=group.device)
        group_num_tokens = zeros.index_add(0, group, sequences.chosen.flatten().long())
    sums = losses.new_zeros(group_num_tokens.shape[0]).index_add(0, group, losses.flatten())
    num_groups = (group_num_tokens > 0).sum().clamp(min=1)
    return (sums / group_num_tokens.clamp(min=1)).sum() * dp_size / num_groups


def _count(field: str, value: int | None, dp_size: int, local: torch.Tensor) -> int:
    if value is None:
        if dp_size > 1:
            raise InvalidInput(
                must(field, f"be given with dp_size = {dp_size}", None, "count over all ranks (LossDenominators.of)")
            )
        value = int(local)
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = -1
    if whole < 0 or whole != value:
        raise InvalidInput(must(field, "be a whole number of at least 0", value, "count over all ranks"))
    return max(whole, 1)  # an all-masked mini-batch has loss 0, not NaN
