"""The denominators of an optimizer step's losses, counted over all ranks or taken from the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from equipoise._checks import as_lengths
from equipoise.errors import InvalidInput, must
from equipoise.planning.step import StepPlan
from equipoise.together import gather_numbers
from equipoise.training.loss.sequences import segment_keys, sequences_of


@dataclass(frozen=True, kw_only=True)
class LossDenominators:
    """The denominators of an optimizer step's losses, over all ranks.

    Attributes:
        num_tokens: real tokens under the loss mask.
        num_rows: real rows, or real sequences in packed rows. A row with an all-zero mask counts too: masking a row
            must not change the weight of the others.
    """

    num_tokens: int
    num_rows: int

    @property
    def is_empty(self) -> bool:
        """True if no token counts: loss and gradient are 0, and the optimizer step should be skipped."""
        return self.num_tokens == 0

    @classmethod
    def of(
        cls,
        loss_mask: torch.Tensor,
        *,
        is_padding: Any = None,
        segment_ids: torch.Tensor | None = None,
        group: Any = None,
    ) -> LossDenominators:
        """Count this rank's rows of the mini-batch and sum over ``group`` in one all-gather.

        Args:
            loss_mask: shape (rows, width), or jagged; nonzero where a token counts.
            is_padding: shape (rows,); padding rows do not count, whatever their mask.
            segment_ids: shape (rows, width), for rows with several sequences; 0 for none.
            group: process group of the data-parallel ranks; None for this process alone.

        Raises:
            InvalidInput: shapes do not match on some rank.

        >>> LossDenominators.of(torch.tensor([[1, 1, 0], [1, 1, 1]]), is_padding=[False, True])
        LossDenominators(num_tokens=2, num_rows=1)
        """

        def counted() -> list[int]:
            chosen = sequences_of(loss_mask, segment_ids=segment_ids, is_padding=is_padding).chosen
            num_rows = _num_rows(loss_mask, is_padding, segment_ids)
            return cast("list[int]", torch.stack([chosen.sum(), num_rows]).tolist())

        counts = gather_numbers(counted, count=2, group=group, doing="counting the tokens of a mini-batch")
        num_tokens, num_real = map(sum, zip(*counts, strict=True))
        return cls(num_tokens=num_tokens, num_rows=num_real)

    @classmethod
    def from_plan(cls, plan: StepPlan, loss_tokens: Any, *, is_padding: Any = None) -> tuple[LossDenominators, ...]:
        """The denominators of each mini-batch of a plan, on the driver: no collective.

        Args:
            plan: the plan of the whole step.
            loss_tokens: tokens under the loss mask of each row, shape (n,), in the caller's numbering.
            is_padding: as passed to :func:`equipoise.plan_step`.

        Raises:
            InvalidInput: there is not one value per row of the plan, or the padding rows are not those of the plan.

        >>> from equipoise import StepSpec, plan_step
        >>> plan = plan_step([5, 4, 3, 2], StepSpec(dp_size=2, num_mini_batches=2))
        >>> [step.num_tokens for step in LossDenominators.from_plan(plan, [4, 3, 2, 1])]
        [7, 3]
        """
        counts = as_lengths(loss_tokens, field="loss_tokens")
        n = plan.order.size
        real = np.ones(n, dtype=bool) if is_padding is None else ~np.asarray(is_padding, dtype=bool)
        for field, size in (("loss_tokens", counts.size), ("is_padding", real.size)):
            if size != n:
                raise InvalidInput(
                    must(field, f"have one value for each of the plan's {n} rows", size, "pass them all")
                )
        found: list[LossDenominators] = []
        by_rank = [plan.micro_batches(rank) for rank in range(plan.dp_size)]
        for step, num_rows in enumerate(plan.num_real_rows.tolist()):
            rows = np.concatenate([micro for rank in by_rank for micro in rank[step]])
            rows = rows[real[rows]]
            if rows.size != num_rows:
                rule = f"leave the plan's {num_rows} real rows in mini-batch {step}"
                raise InvalidInput(must("is_padding", rule, int(rows.size), "pass what plan_step was given"))
            found.append(cls(num_tokens=int(counts[rows].sum()), num_rows=num_rows))
        return tuple(found)


def _num_rows(loss_mask: torch.Tensor, is_padding: Any, segment_ids: torch.Tensor | None) -> torch.Tensor:
    """Real rows, or real sequences in packed rows."""
    padding = torch.zeros(loss_mask.shape[0], dtype=torch.bool, device=loss_mask.device)
    if is_padding is not None:
        padding = torch.as_tensor(is_padding, device=loss_mask.device).bool()
    if segment_ids is None:
        return (~padding).sum()
    key, inside = segment_keys(segment_ids, loss_mask)
    return torch.tensor(torch.unique(key[inside & ~padding.unsqueeze(-1)]).numel(), device=loss_mask.device)
