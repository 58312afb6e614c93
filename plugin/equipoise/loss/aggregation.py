"""Sum over my tokens / global count × dp: the same loss and gradient whatever the ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from equipoise.errors import InvalidInput, must, nearest

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, kw_only=True)
class LossDenominators:
    """What the losses of one optimizer step are divided by, over all ranks.

    Attributes:
        num_tokens: real tokens under the loss mask.
        num_rows: real rows.
    """

    num_tokens: int
    num_rows: int

    @classmethod
    def of(cls, loss_mask: torch.Tensor, *, is_padding: Any = None, group: Any = None) -> LossDenominators:
        """Count this rank's rows of the mini-batch and add up over ``group`` in one all-reduce.

        Args:
            loss_mask: shape (rows, width), or jagged; nonzero where a token counts.
            is_padding: shape (rows,); padding rows count for nothing, whatever their mask.
            group: process group of the data-parallel ranks; None for this process alone.
        """
        rows = loss_mask.shape[0]
        real = torch.ones(rows, dtype=torch.bool, device=loss_mask.device)
        if is_padding is not None:
            real = ~torch.as_tensor(is_padding, device=loss_mask.device).bool()
            if real.shape != (rows,):
                raise InvalidInput(must("is_padding", f"have shape {(rows,)}", tuple(real.shape), "pass one per row"))
        if loss_mask.is_nested:
            per_row = torch.stack([(row != 0).sum() for row in loss_mask.unbind()])
        else:
            per_row = (loss_mask != 0).flatten(1).sum(1)
        counts = torch.stack([(per_row * real).sum(), real.sum()])
        if group is not None:
            dist.all_reduce(counts, group=group)
        return cls(num_tokens=int(counts[0]), num_rows=int(counts[1]))


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """One micro-batch's share of a mini-batch loss, as verl 0.9.1 calls it (``verl/trainer/ppo/core_algos.py``).

    Shares add up over micro-batches; the mean over ranks, which data-parallel engines take, gives the loss::

        token-mean               dp · Σ_tokens loss / batch_num_tokens
        token-sum                dp · Σ_tokens loss
        seq-mean-token-sum       dp · Σ_rows Σ_tokens loss / global_batch_size
        seq-mean-token-mean      dp · Σ_rows mean_tokens loss / global_batch_size
        seq-mean-token-sum-norm  dp · Σ_rows Σ_tokens loss / (global_batch_size · loss_scale_factor)

    Masked positions are selected out, so that NaN or infinity there changes neither value nor gradient.

    Args:
        loss_mat: loss of each token, shape (rows, width).
        loss_mask: nonzero where a token counts, shape (rows, width).
        loss_agg_mode: one of the five above.
        dp_size: data-parallel ranks whose gradients are averaged.
        batch_num_tokens: tokens under the mask in the whole mini-batch; with one rank, those of this call if None.
        global_batch_size: real rows of the whole mini-batch; with one rank, the rows of this call that have a token if
            None.
        loss_scale_factor: constant horizon of the norm mode.

    Raises:
        InvalidInput: an unknown mode, or a global count or horizon that the mode needs is missing.
    """
    if loss_agg_mode not in MODES:
        raise InvalidInput(
            must("loss_agg_mode", f"be one of {list(MODES)}", loss_agg_mode, nearest(str(loss_agg_mode), MODES))
        )
    chosen = loss_mask != 0
    losses = torch.where(chosen, loss_mat, torch.zeros_like(loss_mat))
    per_row = losses.sum(-1)
    tokens = chosen.sum(-1)
    if loss_agg_mode.startswith("token"):
        total = per_row.sum() * dp_size
        if loss_agg_mode == "token-sum":
            return total
        return total / _count("batch_num_tokens", batch_num_tokens, dp_size, int(tokens.sum()))
    rows = _count("global_batch_size", global_batch_size, dp_size, int((tokens > 0).sum()))
    if loss_agg_mode == "seq-mean-token-mean":
        per_row = per_row / tokens.clamp(min=1)
    total = per_row.sum() * dp_size / rows
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None or loss_scale_factor <= 0:
            raise InvalidInput(
                must(
                    "loss_scale_factor",
                    "be a constant above 0 with seq-mean-token-sum-norm",
                    loss_scale_factor,
                    "set the response length limit; the width of a batch would change the loss with its padding",
                )
            )
        total = total / loss_scale_factor
    return total


def _count(field: str, value: int | None, dp_size: int, local: int) -> int:
    if value is None:
        if dp_size > 1:
            raise InvalidInput(
                must(field, f"be given with dp_size = {dp_size}", None, "count over all ranks (LossDenominators.of)")
            )
        value = local
    return max(int(value), 1)  # an all-masked mini-batch has loss 0, not NaN
