"""In the engines: micro-batches from the plan that the batch carries, or verl's own for all ranks alike."""

# verl and torch.distributed are typed in part; what comes from them is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from equipoise.trainer_hooks.on_verl._patches import WIRE_KEY
from equipoise.trainer_hooks.on_verl.wire import WirePlan, checksum, decode
from equipoise.trainer_hooks.on_verl.worker.clock import timed

logger = logging.getLogger("equipoise")
_warned: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What the engine asked for, the same on all ranks."""

    dp_group: Any
    divided_by: int
    min_count: int
    cap: int | None
    fixed_rows: int | None
    group_size: int


def prepare_planned(
    original: Callable[..., Any],
    data: Any,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]] | None]:
    """Stand in for verl's ``prepare_micro_batches`` where the batch carries a plan.

    Which mini-batch this is, and whether the rows are the planned ones, is decided on values that all ranks share, so
    that none of them waits for another: in an update from the lengths of all ranks' rows, which verl has gathered
    already; in a pass by one all-reduce of two integers, in place of the three or more by which verl agrees on a count.

    Returns:
        As verl's: micro-batches and their row ids; None for the ids with fixed micro-batches.
    """

    def fall_back() -> tuple[list[Any], list[list[int]] | None]:
        return original(
            data,
            dp_group=dp_group,
            num_batches_divided_by=num_batches_divided_by,
            same_micro_num_in_dp=same_micro_num_in_dp,
            min_num_micro_batch=min_num_micro_batch,
            use_dynamic_bsz_balance=use_dynamic_bsz_balance,
        )

    from verl.utils import tensordict_utils as tu

    wire = decode(tu.get_non_tensor_data(data, WIRE_KEY, None))
    dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", True)
    limit = tu.get_non_tensor_data(data, "max_token_len_per_gpu", None) if dynamic else None
    call = _Call(
        dp_group=dp_group,
        divided_by=num_batches_divided_by or 1,
        min_count=min_num_micro_batch or 1,
        cap=None if limit is None else int(limit) * int(tu.get_non_tensor_data(data, "sp_size", 1)),
        fixed_rows=None if dynamic else int(tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", 0)),
        group_size=int(tu.get_non_tensor_data(data, "force_group_size", 1)),
    )
    lengths = row_lengths(data)
    step, why = _planned_step(wire, lengths, tu.get_non_tensor_data(data, "global_token_num", None), call)
    if step is None:
        _warn_once(why)
        return fall_back()
    if data.get("global_batch_size", None) is not None:
        tu.assign_non_tensor(data, global_batch_size=int(wire.num_real_rows[step]))
    if wire.sizes is None or not dynamic:
        # fixed micro-batches: rows are dispatched in the plan's order, verl cuts them as planned
        micro_batches, ids = fall_back()
        return (timed(data, micro_batches, step) if wire.timed else micro_batches), ids
    why = _breach(wire, step, call)
    if why:
        _warn_once(why)
        return fall_back()
    ends = np.cumsum(wire.sizes[step][_rank(call)]).tolist()
    indices = [list(range(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    micro_batches = [tu.index_select_tensor_dict(data, rows) for rows in indices]
    return (timed(data, micro_batches, step) if wire.timed else micro_batches), indices


def row_lengths(data: Any) -> list[int]:
    """Real tokens of each row, whatever the padded width."""
    ids = data["input_ids"]
    if ids.is_nested:
        return ids.offsets().diff().tolist()
    return data["attention_mask"].sum(-1).tolist()


def _rank(call: _Call) -> int:
    if call.dp_group is None or not dist.is_initialized():
        return 0
    return dist.get_rank(call.dp_group)


def _world(call: _Call) -> int:
    if call.dp_group is None or not dist.is_initialized():
        return 1
    return dist.get_world_size(call.dp_group)


def _planned_step(wire: WirePlan, lengths: list[int], everyones: Any, call: _Call) -> tuple[int | None, str]:
    """The mini-batch that these rows are, or None and why; the same answer on every rank."""
    world = _world(call)
    if world != wire.dp_size:
        return None, f"the plan is for {wire.dp_size} data-parallel ranks, the engine has {world}"
    if everyones is not None:
        shares = np.array_split(np.asarray(everyones), world)
        sums = np.array([checksum(share) for share in shares])
        found = np.flatnonzero((wire.checksums == sums[:, None]).all(axis=0))
        if found.size:
            return int(found[0]), ""
        return None, "the rows of a mini-batch are not the planned ones (are they shuffled or filtered in the workers?)"
    mine = np.flatnonzero(wire.checksums[_rank(call)] == checksum(lengths))
    step = int(mine[0]) if mine.size else -1
    if world > 1:
        from verl.utils.device import get_device_name

        agreed = torch.tensor([step, -step], device=get_device_name())
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=call.dp_group)
        low, high = int(agreed[0]), -int(agreed[1])
        step = low if low == high else -1
    if step < 0:
        return None, "a rank holds rows that the plan does not describe"
    return step, ""


def _breach(wire: WirePlan, step: int, call: _Call) -> str:
    """Why the engine cannot run the planned micro-batches; empty if it can. The same on every rank."""
    sizes = wire.sizes
    count = 0 if sizes is None else sizes[step].shape[1]
    if call.group_size != 1:
        return f"the engine keeps groups of {call.group_size} rows together, which the plan does not"
    if count % call.divided_by or count < call.min_count:
        return (
            f"the engine wants a multiple of {call.divided_by} and at least {call.min_count} micro-batches, the plan"
            f" has {count}"
        )
    if call.cap is not None and int(wire.max_tokens[step]) > call.cap:
        return f"a planned micro-batch has {int(wire.max_tokens[step])} tokens, above the engine's cap of {call.cap}"
    return ""


def _warn_once(why: str) -> None:
    if why not in _warned:
        _warned.add(why)
        logger.warning("equipoise: falling back to verl's micro-batches on all ranks: %s", why)
