"""In the engines: micro-batches from the batch's plan, or verl's own on all ranks.

Which mini-batch the rows are, and whether they are the planned ones, is decided on values that all ranks share. In an
update those are the lengths of all ranks' rows, which verl has already gathered: no collective is added. In a pass it
takes one small all-gather, instead of the three or more with which verl agrees on a count; a rank that cannot read its
plan reports it there. An update has no such vote: a corrupted message raises on its rank before the model runs, and the
trainer, which waits for all ranks, gets that error.
"""

# verl and torch.distributed are partly typed; what comes from them is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from equipoise.together import gather_numbers
from equipoise.trainer_hooks.on_verl._patches import WIRE_KEY
from equipoise.trainer_hooks.on_verl.wire import WirePlan, checksum, decode
from equipoise.trainer_hooks.on_verl.worker.clock import timed
from equipoise.training.batch import consecutive, cut_rows, token_lengths

logger = logging.getLogger("equipoise")
_warned: set[str] = set()

MicroBatches = tuple[list[Any], list[list[int]] | None]
_OTHER_ROWS, _OTHER_RANKS = -1, -2  # instead of the index of a mini-batch


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The arguments of the engine's call, the same on all ranks."""

    dp_group: Any
    divided_by: int
    min_count: int
    cap: int | None
    group_size: int

    @property
    def dynamic(self) -> bool:
        return self.cap is not None

    @property
    def rank(self) -> int:
        return 0 if self.dp_group is None else dist.get_rank(self.dp_group)

    @property
    def world(self) -> int:
        return 1 if self.dp_group is None else dist.get_world_size(self.dp_group)


def prepare_planned(
    original: Callable[..., Any],
    data: Any,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> MicroBatches:
    """Replace verl's ``prepare_micro_batches`` if the batch carries a plan.

    Returns:
        As verl does: micro-batches and their row ids; None for the ids with fixed micro-batches.

    Raises:
        WireError: the plan's message is corrupted; on all ranks in a pass, on this rank alone in an update.
    """

    def verls_own() -> MicroBatches:
        return original(
            data,
            dp_group=dp_group,
            num_batches_divided_by=num_batches_divided_by,
            same_micro_num_in_dp=same_micro_num_in_dp,
            min_num_micro_batch=min_num_micro_batch,
            use_dynamic_bsz_balance=use_dynamic_bsz_balance,
        )

    from verl.utils import tensordict_utils as tu

    dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", True)
    limit = tu.get_non_tensor_data(data, "max_token_len_per_gpu", None) if dynamic else None
    call = _Call(
        dp_group=dp_group,
        divided_by=num_batches_divided_by or 1,
        min_count=min_num_micro_batch or 1,
        cap=None if limit is None else int(limit) * int(tu.get_non_tensor_data(data, "sp_size", 1)),
        group_size=int(tu.get_non_tensor_data(data, "force_group_size", 1)),
    )
    message = tu.get_non_tensor_data(data, WIRE_KEY, None)
    everyones = tu.get_non_tensor_data(data, "global_token_num", None)
    if everyones is None:
        wire, step = _step_of_pass(message, data, call)
    else:
        wire = decode(message)
        step = _step_of_update(wire, everyones, call)
    known = _keep_count_of_real_rows(data, wire, step, call)
    why = _why_not(wire, step, call)
    if why:
        lost = "" if known else "; sequence means then count padding rows, as these columns do not identify them"
        _warn_once(f"verl's own micro-batches are used on all ranks: {why}{lost}")
        return verls_own()
    if step < 0:
        return verls_own()
    if wire.sizes is None or not dynamic:
        # fixed micro-batches: rows are dispatched in plan order, so verl cuts them as planned
        micro_batches, indices = verls_own()
    else:
        indices = [rows.tolist() for rows in consecutive(wire.sizes[step][call.rank].tolist())]
        micro_batches = cut_rows(data, indices)
    return (timed(data, micro_batches, step) if wire.timed else micro_batches), indices


def _step_of_update(wire: WirePlan, everyones: Sequence[int], call: _Call) -> int:
    """The mini-batch that these rows are, from the lengths of all ranks' rows."""
    if call.world != wire.dp_size:
        return _OTHER_RANKS
    shares = np.array_split(np.asarray(everyones), call.world)
    sums = np.array([checksum(share) for share in shares])
    found = np.flatnonzero((wire.checksums == sums[:, None]).all(axis=0))
    return int(found[0]) if found.size else _OTHER_ROWS


def _step_of_pass(message: object, data: Any, call: _Call) -> tuple[WirePlan, int]:
    """The plan, and the mini-batch that the rows are on every rank; one collective."""
    plans: list[WirePlan] = []

    def mine() -> tuple[int]:
        wire = decode(message)
        plans.append(wire)
        if call.world != wire.dp_size:
            return (_OTHER_RANKS,)
        found = np.flatnonzero(wire.checksums[call.rank] == checksum(token_lengths(data)))
        return (int(found[0]) if found.size else _OTHER_ROWS,)

    found = gather_numbers(mine, count=1, group=call.dp_group, doing="reading the plan of a pass")
    steps = {step for (step,) in found}
    return plans[0], steps.pop() if len(steps) == 1 else min(_OTHER_ROWS, *steps)


def _keep_count_of_real_rows(data: Any, wire: WirePlan, step: int, call: _Call) -> bool:
    """Make sequence means count only the mini-batch's real rows, also in verl's fallback.

    If the rows are not a planned mini-batch, the ranks count them, in one collective.

    Returns:
        Whether the count is right.
    """
    from verl.utils import tensordict_utils as tu

    if data.get("global_batch_size", None) is None:
        return True  # a pass: nothing is averaged
    if step >= 0:
        real = int(wire.num_real_rows[step])
    else:
        counts = gather_numbers(lambda: (_real_rows(data),), count=1, group=call.dp_group, doing="counting real rows")
        if any(count < 0 for (count,) in counts):
            return False
        real = sum(count for (count,) in counts)
    tu.assign_non_tensor(data, global_batch_size=real)
    return True


def _real_rows(data: Any) -> int:
    """Real rows of this rank; -1 if the columns do not tell.

    A padding row repeats one token, has a response of one token, and an all-zero mask.
    """
    columns = [data.get(name, None) for name in ("input_ids", "responses", "response_mask")]
    if any(not isinstance(column, torch.Tensor) or not column.is_nested for column in columns):
        return -1
    rows = zip(*(column.unbind() for column in columns), strict=True)
    padding = sum(
        response.numel() == 1 and not bool(mask.any()) and bool((ids == ids[0]).all()) for ids, response, mask in rows
    )
    return len(data) - padding


def _why_not(wire: WirePlan, step: int, call: _Call) -> str:
    """Why the engine cannot run the plan; empty if it can, or there is none. The same on every rank."""
    if wire.sizes is None:
        return ""
    if step == _OTHER_RANKS:
        return f"the plan is for {wire.dp_size} data-parallel ranks, the engine has {call.world}"
    if step < 0:
        return "the rows are not the planned ones (are they shuffled or filtered in the workers?)"
    if not call.dynamic:
        return ""
    count = wire.sizes[step].shape[1]
    if call.group_size != 1:
        return f"the engine keeps groups of {call.group_size} rows together, which the plan does not"
    if count % call.divided_by or count < call.min_count:
        return (
            f"the engine needs a multiple of {call.divided_by} and at least {call.min_count} micro-batches, the plan"
            f" has {count}"
        )
    if call.cap is not None and int(wire.max_tokens[step]) > call.cap:
        return f"a planned micro-batch has {int(wire.max_tokens[step])} tokens, above the engine's cap of {call.cap}"
    return ""


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("equipoise: %s", text)
