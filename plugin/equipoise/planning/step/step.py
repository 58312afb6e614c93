"""``plan_step``: lengths in, a plan out. Start reading here.

For each mini-batch the planner takes the fewest micro-batches that can work, lays the rows out by simple rules,
balances these layouts by a search under the cap, and keeps the best one. No plan costs more than a plain rule or the
incoming order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise._arrays import BoolArray, IntArray, counts
from equipoise._checks import as_vector, of_kind
from equipoise.errors import InvalidInput, must
from equipoise.planning.partition.divide import group_numbers
from equipoise.planning.step.composition import mini_batch_rows
from equipoise.planning.step.errors import no_columns
from equipoise.planning.step.groups import kept_whole
from equipoise.planning.step.layout import Layout, dispatch_order, mini_batches
from equipoise.planning.step.limits import check_counts, check_oversize, out_of_room
from equipoise.planning.step.pieces import Pieces
from equipoise.planning.step.result import PlanStats, StepPlan
from equipoise.planning.step.search import search
from equipoise.planning.step.spec import StepSpec
from equipoise.planning.step.starts import as_it_came
from equipoise.planning.workload import CostModel, MicroBatchCost, TransformerCost, as_lengths, row_costs


def plan_step(
    lengths: Any,
    spec: StepSpec,
    *,
    cost: CostModel | None = None,
    group_ids: Any = None,
    is_padding: Any = None,
) -> StepPlan:
    """Plan one trainer step from the lengths of its rows.

    Each row gets a mini-batch, a rank and a micro-batch. No micro-batch is empty or above the cap, all ranks run the
    same number of micro-batches, and the lockstep cost is low. The plan is a pure function of the arguments.

    ``plan.incoming`` measures the same mini-batches with contiguous ranks and micro-batches filled in order.

    Args:
        lengths: tokens of each row, shape (n,): a list, a numpy array or a CPU tensor.
        spec: the trainer's settings.
        cost: cost model; ``TransformerCost()`` if None. A model with a ``micro_batch`` method, such as
            :class:`equipoise.PaddedCost`, is for engines that pad: the cap limits rows × longest row, and
            ``keep_groups`` is not supported.
        group_ids: shape (n,), the group of each row, such as its prompt's uid; any hashable. Required by
            ``spec.keep_groups`` and without effect if that is "none". Padding rows are in no group.
        is_padding: shape (n,), True for padding rows; None for no padding.

    Returns:
        The plan.

    Raises:
        InvalidInput: an argument breaks its rule.
        InfeasiblePlan: settings and lengths conflict; names both and the nearest legal value.

    >>> spec = StepSpec(dp_size=2, max_token_len_per_gpu=10)
    >>> plan = plan_step([9, 1, 5, 5], spec)
    >>> [[rows.tolist() for rows in plan.micro_batches(rank)[0]] for rank in range(2)]
    [[[0, 1]], [[2, 3]]]
    """
    of_kind("spec", spec, StepSpec, "pass equipoise.StepSpec(dp_size=..., num_mini_batches=...)")
    tokens = as_lengths(lengths)
    padding = _flags(is_padding, tokens.size)
    model = cost if cost is not None else TransformerCost()
    costs = row_costs(model, tokens)
    padded = model if isinstance(model, MicroBatchCost) else None
    group = _groups(group_ids, tokens.size, spec, padded=padded is not None)
    check_counts(tokens.size, int((~padding).sum()), spec)
    check_oversize(tokens, spec)
    members = mini_batch_rows(tokens, padding, spec)
    minis = mini_batches(members, costs, tokens, padding, spec, padded)
    if group is None:
        candidates = [[Pieces.of_rows(mini)] for mini in minis]
    else:
        candidates = kept_whole(minis, members, tokens, padding, group, spec)
    layouts = _all_found(search(candidates, spec), candidates, spec)
    order, sizes = dispatch_order(layouts, members)
    came = [as_it_came(mini, spec.min_micro_batches, spec.cap) for mini in minis]
    tight_bound = sum(mini.bound(spec.cap) for mini in minis)
    real = np.array([int((~mini.padding).sum()) for mini in minis])
    real.flags.writeable = False
    return StepPlan(
        spec=spec,
        order=order,
        sizes=sizes,
        num_real_rows=real,
        stats=PlanStats.of(layouts, tight_bound),
        incoming=PlanStats.of(came, tight_bound),
    )


def _all_found(layouts: list[Layout | None], candidates: list[list[Pieces]], spec: StepSpec) -> list[Layout]:
    """The layouts; raise InfeasiblePlan if a mini-batch has none."""
    found = [layout for layout in layouts if layout is not None]
    if len(found) < len(layouts):
        j = layouts.index(None)
        pieces = candidates[j][0]
        if pieces.tied is None:
            raise out_of_room([each[0].mini for each in candidates], spec)
        size = counts(pieces.tied[~pieces.mini.padding], int(pieces.tied.max()) + 1)
        raise no_columns(size[size > 0], j, spec)
    return found


def _groups(group_ids: Any, n: int, spec: StepSpec, *, padded: bool) -> IntArray | None:
    """Group of each row, or None if groups need not be kept."""
    if padded and spec.keep_groups != "none":
        remedy = 'use keep_groups="none" or a cost model without micro_batch'
        raise InvalidInput(must("keep_groups", "be 'none' if micro-batches are padded", spec.keep_groups, remedy))
    if group_ids is None and spec.keep_groups != "none":
        remedy = "pass the group of each row, such as its prompt's uid"
        raise InvalidInput(must("group_ids", f"be given with keep_groups = {spec.keep_groups!r}", None, remedy))
    group = None if group_ids is None else group_numbers(group_ids, n)
    return None if spec.keep_groups == "none" else group


def _flags(is_padding: Any, n: int) -> BoolArray:
    if is_padding is None:
        return np.zeros(n, dtype=bool)
    flags = as_vector("is_padding", is_padding, "pass one flag per row")
    if flags.shape != (n,):
        raise InvalidInput(must("is_padding", f"have shape {(n,)}", flags.shape, "pass one flag per row"))
    if flags.dtype.kind not in "biuf" or not np.isin(flags, (0, 1)).all():
        raise InvalidInput(must("is_padding", "hold only True and False", flags.tolist(), "pass one flag per row"))
    return flags.astype(bool)
