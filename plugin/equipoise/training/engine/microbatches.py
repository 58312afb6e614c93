"""A rank's rows of one mini-batch as micro-batches, the same number on every rank."""

# tensordict annotates its columns loosely; the values are checked here at run time.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from equipoise._arrays import IntArray
from equipoise.errors import InfeasiblePlan, InvalidInput, must
from equipoise.planning.partition import pack
from equipoise.planning.partition.pack import round_up
from equipoise.planning.step.result import StepPlan
from equipoise.training.batch import consecutive, cut_rows, join_outputs, token_lengths
from equipoise.training.batch.cut import Outputs
from equipoise.training.batch.reorder import num_rows
from equipoise.training.engine.agreement import CAP, Ask, Need, agree, checksum, raise_shortage

_FILLER_TOKENS = 2


class MicroBatches(NamedTuple):
    """Micro-batches and the row indices of each in the data, empty for one of zero weight.

    A zero-weight micro-batch holds one dummy row, so that forward and backward run as on the other ranks. Its loss is 0
    times its outputs, and its outputs are discarded.
    """

    batches: list[TensorDict]
    indices: list[IntArray]

    def restore(self, outputs: Sequence[Outputs]) -> TensorDict:
        """Dense or jagged outputs in the order of the data's rows.

        Args:
            outputs: one per micro-batch, in order, with or without those of zero weight.

        Returns:
            The columns of the outputs, with the data's number of rows.

        Raises:
            InvalidInput: the number of outputs or their rows does not match.
        """
        real = [i for i, rows in enumerate(self.indices) if rows.size]
        if len(outputs) == len(self.indices):
            outputs = [outputs[i] for i in real]
        return join_outputs(outputs, [self.indices[i] for i in real])


def prepare_micro_batches(
    data: TensorDict,
    *,
    plan: StepPlan | None = None,
    rank: int | None = None,
    mini_batch: int | None = None,
    max_token_len: int | None = None,
    micro_batch_size: int | None = None,
    sp_size: int = 1,
    force_group_size: int = 1,
    multiple: int = 1,
    min_micro_batches: int = 1,
    on_shortage: Literal["error", "zero_weight"] = "error",
    oversize: Literal["error", "alone"] = "error",
    group: Any = None,
) -> MicroBatches:
    """Split a rank's rows by a plan, under a token cap, or into a fixed number of rows.

    A plan needs no communication: rows that do not match it are an error on their rank alone. Otherwise the ranks of
    ``group`` agree on one count in one all-gather, which also carries errors: an error on one rank is raised on all of
    them with the same text.

    Args:
        data: this rank's rows: jagged ``input_ids``, or dense ones with an ``attention_mask``. With a plan, in dispatch
            order: the rows of ``mini_batch``, or all the rank's rows.
        plan: from :func:`equipoise.plan_step`; excludes ``max_token_len`` and all settings after it.
        rank: data-parallel rank, with a plan; None for the position in ``group``.
        mini_batch: optimizer step of the plan; None for all of them.
        max_token_len: the most tokens per GPU; the cap is ``max_token_len · sp_size``.
        micro_batch_size: rows of each micro-batch, instead of the cap.
        sp_size: GPUs that share a row's tokens.
        force_group_size: neighboring rows that stay together.
        multiple: the count is a multiple of this.
        min_micro_batches: the lowest count.
        on_shortage: whether a rank with too few rows is an "error" or gets "zero_weight" micro-batches.
        oversize: whether a row above the cap is an "error" or its own micro-batch ("alone", with a warning).
        group: process group of the data-parallel ranks; None for this process alone.

    Returns:
        ``(batches, indices)``; its ``restore`` returns outputs to the order of the rows.

    Raises:
        InvalidInput: an argument breaks its rule, or the rows cannot be split as requested.
        InfeasiblePlan: a row is above the cap, or a rank has too few rows.

    >>> ids = torch.nested.as_nested_tensor([torch.arange(n) for n in (4, 1, 3)], layout=torch.jagged)
    >>> cut = prepare_micro_batches(TensorDict({"input_ids": ids}, batch_size=[3]), max_token_len=5)
    >>> [rows.tolist() for rows in cut.indices]
    [[0], [1, 2]]
    """
    ask = partial(
        Ask.of,
        planned=plan is not None,
        max_token_len=max_token_len,
        micro_batch_size=micro_batch_size,
        sp_size=sp_size,
        force_group_size=force_group_size,
        multiple=multiple,
        min_micro_batches=min_micro_batches,
        on_shortage=on_shortage,
        oversize=oversize,
    )
    if plan is not None:
        ask()
        indices = _planned(data, plan, rank, mini_batch, group)
        return MicroBatches(cut_rows(data, indices), indices)
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        rule = f"be the data-parallel group of {dist.get_world_size()} processes"
        raise InvalidInput(must("group", rule, None, "pass it, so that ranks agree on a count, or pass a plan"))
    return agreed_micro_batches(data, ask, group=group)


def agreed_micro_batches(data: TensorDict, ask: Callable[[], Ask], *, group: Any) -> MicroBatches:
    """Split a rank's rows into the same number of micro-batches as the other ranks; one collective.

    Args:
        data: this rank's rows.
        ask: returns the request; whatever it raises is raised on all ranks.
        group: process group of the ranks; None for this process alone.

    Raises:
        EquipoiseError: any rank failed; raised on every rank.
    """
    indices = _agreed(data, ask, group)
    real = iter(cut_rows(data, [rows for rows in indices if rows.size]))
    return MicroBatches([next(real) if rows.size else _filler(data) for rows in indices], indices)


def weightless(count: int) -> MicroBatches:
    """Micro-batches of zero weight, for a rank that failed while the others continue."""
    return MicroBatches([_filler(None) for _ in range(count)], [np.zeros(0, dtype=np.int64)] * count)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The rows of this rank in as few micro-batches as it needs.

    Attributes:
        ask: the request.
        units: tokens of each row, or of each group of rows that stay together.
        parts: units of each micro-batch.
        need: what the other ranks must know.
    """

    ask: Ask
    units: IntArray
    parts: list[IntArray]
    need: Need

    @classmethod
    def of(cls, data: TensorDict, ask: Ask) -> _Cut:
        cut_rows(data, [])  # find columns that cannot be split before the ranks continue
        lengths = token_lengths(data)
        if lengths.size and lengths.min() < 1:
            row = int(lengths.argmin())
            raise InvalidInput(must(f"row {row}", "have a token", 0, "drop the row, or pad it to one"))
        units, parts = _first_cut(lengths, ask)
        most = len(parts) if ask.rows is not None else int(units.size)
        return cls(ask=ask, units=units, parts=parts, need=Need(count=len(parts), most=most, settings=checksum(ask)))


def _agreed(data: TensorDict, ask: Callable[[], Ask], group: Any) -> list[IntArray]:
    cuts: list[_Cut] = []

    def part() -> Need:
        cuts.append(_Cut.of(data, ask()))
        return cuts[0].need

    needs = agree(part, group)
    cut, asked = cuts[0], cuts[0].ask
    count = round_up(max(asked.least, *(need.count for need in needs)), asked.multiple)
    if not asked.fill:
        raise_shortage(needs, count, multiple=asked.multiple)
    parts = cut.parts
    if asked.cap is not None:
        parts = _refined(cut.units, parts, min(count, cut.need.most), asked)
    indices = [(part[:, None] * asked.together + np.arange(asked.together)).ravel() for part in parts]
    return indices + [np.zeros(0, dtype=np.int64)] * (count - len(indices))


def _first_cut(lengths: IntArray, ask: Ask) -> tuple[IntArray, list[IntArray]]:
    """The tokens of this rank's units (rows, or groups of them), and the fewest micro-batches it needs."""
    rows = int(lengths.size)
    if rows % ask.together:
        rule = f"be a multiple of force_group_size = {ask.together}"
        raise InvalidInput(must("rows", rule, rows, "keep groups whole on each rank"))
    units = lengths.reshape(-1, ask.together).sum(axis=1)
    if not units.size:
        return units, []
    if ask.rows is not None:
        if rows % ask.rows:
            legal = [size for size in range(1, rows + 1) if rows % size == 0 and size % ask.together == 0]
            rule = f"be a multiple of micro_batch_size = {ask.rows}"
            raise InvalidInput(must("rows", rule, rows, f"legal sizes: {legal}"))
        return units, np.split(np.arange(units.size, dtype=np.int64), rows // ask.rows)
    widest = int(units.argmax())
    if ask.cap is not None and units[widest] > ask.cap and not ask.alone:
        what = "row" if ask.together == 1 else f"group of {ask.together} rows from row"
        rule = f"have at most {ask.cap} tokens, the cap of a micro-batch"
        remedy = f'raise {CAP} to {int(units[widest])}, shorten the row, or pass oversize="alone"'
        raise InfeasiblePlan(must(f"{what} {widest * ask.together}", rule, int(units[widest]), remedy))
    return units, _packed(units, ask, 1)


def _packed(units: IntArray, ask: Ask, least: int) -> list[IntArray]:
    capacity = ask.cap if ask.cap is not None else int(units.sum())
    return pack(units, capacity=capacity, min_groups=least, oversize="alone" if ask.alone else "error")


def _refined(units: IntArray, parts: list[IntArray], count: int, ask: Ask) -> list[IntArray]:
    """Exactly ``count`` micro-batches, at least as many as ``parts``."""
    if count <= len(parts):
        return parts
    finer = _packed(units, ask, count)
    if len(finer) == count:
        return finer
    while len(parts) < count:  # the packer exceeded the requested count: halve parts instead
        fullest = max((part for part in parts if part.size > 1), key=lambda part: int(units[part].sum()))
        rest = [part for part in parts if part is not fullest]
        parts = [*rest, fullest[::2], fullest[1::2]]
    return parts


def _planned(data: TensorDict, plan: StepPlan, rank: int | None, mini_batch: int | None, group: Any) -> list[IntArray]:
    ranks = 1 if group is None else dist.get_world_size(group)
    if group is not None and ranks != plan.dp_size:
        raise InvalidInput(
            must("plan", f"be for the group's {ranks} ranks", plan.dp_size, "set StepSpec.dp_size to it")
        )
    steps = plan.micro_batches(_rank(rank, group))
    if mini_batch is not None and not 0 <= mini_batch < len(steps):
        raise InvalidInput(must("mini_batch", f"be from 0 to {len(steps) - 1}", mini_batch, "count from 0"))
    sizes = [[rows.size for rows in step] for step in steps]
    every = consecutive([size for step in sizes for size in step])
    num_planned = sum(rows.size for rows in every)
    n = num_rows(data)
    if mini_batch is None:
        chosen, first = every, 0
    else:
        before = sum(len(step) for step in sizes[:mini_batch])
        chosen = every[before : before + len(sizes[mini_batch])]
        own = sum(sizes[mini_batch])
        first = int(chosen[0][0]) if n == own else 0
    wanted = sum(rows.size for rows in chosen)
    if n not in (wanted, num_planned):
        rule = f"have the {wanted} rows that the plan gives rank {_rank(rank, group)}"
        raise InvalidInput(must("data", rule, n, "reorder the batch by plan.order and split it by rank"))
    indices = [rows - first for rows in chosen]
    cap = plan.spec.cap
    if cap is not None:
        lengths = token_lengths(data)
        for rows in indices:
            tokens = int(lengths[rows].sum())
            if rows.size > 1 and tokens > cap:
                rule = f"keep each micro-batch of the plan within its cap of {cap} tokens"
                remedy = "pass the rows that were planned, in dispatch order: eq.reorder(batch, plan.rank_rows(rank))"
                raise InvalidInput(must("data", rule, tokens, remedy))
    return indices


def _rank(rank: int | None, group: Any) -> int:
    if rank is not None:
        return rank
    if group is not None:
        return dist.get_rank(group)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidInput(must("rank", "be given with a plan and no group", None, "pass the data-parallel rank"))
    return 0


def _filler(data: TensorDict | None) -> TensorDict:
    """One row that any model accepts: token 0 twice."""
    ids = None if data is None else data.get("input_ids", None)
    device = ids.device if isinstance(ids, torch.Tensor) else None
    row = torch.zeros(1, _FILLER_TOKENS, dtype=torch.int64, device=device)
    if isinstance(ids, torch.Tensor) and not ids.is_nested:
        return TensorDict({"input_ids": row, "attention_mask": torch.ones_like(row)}, batch_size=[1])
    jagged = torch.nested.as_nested_tensor([row[0]], layout=torch.jagged)
    return TensorDict({"input_ids": jagged}, batch_size=[1])
