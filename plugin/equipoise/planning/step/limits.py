"""Feasibility: whether the rows divide, whether they fit under the cap, and how many micro-batches are possible."""

from __future__ import annotations

import dataclasses
import math
import warnings

from equipoise._arrays import IntArray
from equipoise.errors import EquipoiseWarning, InfeasiblePlan, must
from equipoise.planning.partition.pack import fewest_groups, round_up
from equipoise.planning.step import starts
from equipoise.planning.step.layout import Layout, MiniBatch
from equipoise.planning.step.spec import StepSpec


def check_counts(n: int, num_real: int, spec: StepSpec) -> None:
    """Check that the rows divide as the spec requires, whatever their lengths.

    Raises:
        InfeasiblePlan: they do not; names the settings and the nearest legal value.
    """
    if not _rows_divide(n, spec):
        raise InfeasiblePlan(_rows_text(n, spec))
    if num_real < spec.num_mini_batches:
        fewer = (j for j in range(num_real, 0, -1) if _rows_divide(n, dataclasses.replace(spec, num_mini_batches=j)))
        legal = next(fewer, None)
        rule = f"be at most the number of real rows, {num_real}, so that each optimizer step has one"
        remedy = "skip the step, because there is nothing to train on" if legal is None else f"use {legal}"
        raise InfeasiblePlan(must("num_mini_batches", rule, spec.num_mini_batches, remedy))
    if spec.micro_batch_size_per_gpu is None:
        _check_micro_batch_counts(n, spec)


def _unit(spec: StepSpec) -> tuple[int, str]:
    """The number whose multiples divide into equal ranks and whole micro-batches, and its factors as text."""
    fields = ["dp_size", "num_mini_batches"]
    if spec.micro_batch_size_per_gpu is not None:
        fields += ["micro_batch_size_per_gpu", "micro_batch_multiple"]
    values: list[int] = [getattr(spec, field) for field in fields]
    return math.prod(values), f"{' × '.join(fields)} = {' × '.join(map(str, values))} = {math.prod(values)}"


def _fewest_rows(spec: StepSpec) -> int:
    cells = spec.dp_size * spec.num_mini_batches
    if spec.micro_batch_size_per_gpu is None:
        return cells
    return cells * spec.micro_batch_size_per_gpu * round_up(spec.min_micro_batches, spec.micro_batch_multiple)


def _rows_divide(n: int, spec: StepSpec) -> bool:
    even = spec.equal_count or spec.micro_batch_size_per_gpu is not None
    return n >= _fewest_rows(spec) and not (even and n % _unit(spec)[0])


def _rows_text(n: int, spec: StepSpec) -> str:
    unit, factors = _unit(spec)
    fewest = _fewest_rows(spec)
    even = spec.equal_count or spec.micro_batch_size_per_gpu is not None
    rule = f"be a multiple of {factors}" if even else f"be at least {factors}"
    if fewest > unit:
        rule += f" and at least {fewest}, for min_micro_batches = {spec.min_micro_batches}"
    remedies = [f"pad to {max(fewest, round_up(n, unit) if even else n)} rows"]
    if even and n - n % unit >= fewest:
        remedies.append(f"drop to {n - n % unit}")
    if spec.micro_batch_size_per_gpu is not None:
        size = _nearest_size(n, spec)
        remedies += [] if size is None else [f"use a micro_batch_size_per_gpu of {size}"]
    elif even and n >= fewest:
        remedies.append("set equal_count=False")
    return must("the number of rows", rule, n, " or ".join(remedies))


def _nearest_size(n: int, spec: StepSpec) -> int | None:
    """The legal micro-batch size nearest to the requested one."""
    wanted = spec.micro_batch_size_per_gpu or 1
    rows = n // (spec.dp_size * spec.num_mini_batches)
    sizes = range(1, rows + 1)
    legal = [size for size in sizes if _rows_divide(n, dataclasses.replace(spec, micro_batch_size_per_gpu=size))]
    return min(legal, key=lambda size: (abs(size - wanted), size), default=None)


def _check_micro_batch_counts(n: int, spec: StepSpec) -> None:
    """Check that every rank has enough rows for the required micro-batches."""
    rows = n // spec.num_mini_batches // spec.dp_size  # the fewest on a rank in a mini-batch
    multiple, least = spec.micro_batch_multiple, spec.min_micro_batches
    have = f"the {rows} rows that a rank has in a mini-batch"
    pad = f"pad to {spec.dp_size * spec.num_mini_batches * round_up(least, multiple)} rows"
    if multiple > rows:
        rule = f"be at most {have}, so that no micro-batch is empty"
        raise InfeasiblePlan(must("micro_batch_multiple", rule, multiple, f"use at most {rows} or {pad}"))
    most = rows // multiple * multiple
    if least > most:
        rule = f"be at most {most} with micro_batch_multiple = {multiple} and {have}"
        raise InfeasiblePlan(must("min_micro_batches", rule, least, f"use at most {most} or {pad}"))


def check_oversize(tokens: IntArray, spec: StepSpec) -> None:
    """Check that no row is above the cap; with ``oversize="alone"``, warn of one that is.

    Raises:
        InfeasiblePlan: a row is above the cap; names the row, its length and the cap.
    """
    if spec.cap is None or int(tokens.max()) <= spec.cap:
        return
    row = int(tokens.argmax())
    over = int((tokens > spec.cap).sum())
    factors = f"{spec.max_token_len_per_gpu} × {spec.sp_size} = {spec.cap}"
    rule = f"be at most the cap, max_token_len_per_gpu × sp_size = {factors}"
    remedy = f"raise max_token_len_per_gpu to {-(-int(tokens[row]) // spec.sp_size)} or shorten the row"
    remedy += f" ({over} rows are above the cap)" if over > 1 else ""
    text = must(f"lengths[{row}]", rule, int(tokens[row]), remedy)
    if spec.oversize == "error":
        raise InfeasiblePlan(f'{text}, or set oversize="alone"')
    warnings.warn(f"{text}; it gets a micro-batch of its own", EquipoiseWarning, stacklevel=3)


def fewest_columns(mini: MiniBatch, spec: StepSpec) -> int:
    """Lower bound on the number of micro-batches."""
    if mini.fixed_rows is not None:
        return int(mini.rows[0]) // mini.fixed_rows
    cells = 0 if spec.cap is None else fewest_groups(mini.tokens, spec.cap)
    return round_up(max(spec.min_micro_batches, -(-cells // mini.dp_size)), spec.micro_batch_multiple)


def most_columns(mini: MiniBatch, spec: StepSpec) -> int:
    """The largest number of micro-batches that leaves none empty on any rank."""
    if mini.fixed_rows is not None:
        return int(mini.rows[0]) // mini.fixed_rows
    return int(mini.rows.min()) // spec.micro_batch_multiple * spec.micro_batch_multiple


def roomiest(mini: MiniBatch, spec: StepSpec) -> Layout:
    """The layout with the most micro-batches and the least tokens in the fullest one."""
    columns = most_columns(mini, spec)
    return Layout(mini, columns, starts.by_fold(mini, columns))


def out_of_room(minis: list[MiniBatch], spec: StepSpec) -> InfeasiblePlan:
    """The error for rows that do not fit under the cap even in the largest number of micro-batches."""
    if minis[0].padded is not None:
        return _out_of_padded_room(minis, spec)
    layouts = [roomiest(mini, spec) for mini in minis]
    fullest = max(layouts, key=Layout.crowded_tokens)
    rows = fullest.mini.rows
    have = str(rows.min()) if rows.min() == rows.max() else f"{rows.min()} or {rows.max()}"
    remedies = [f"raise it to {-(-fullest.crowded_tokens() // spec.sp_size)}"]
    for multiple in range(spec.micro_batch_multiple - 1, 0, -1):
        other = dataclasses.replace(spec, micro_batch_multiple=multiple)
        if all(most_columns(mini, other) and roomiest(mini, other).legal(spec.cap) for mini in minis):
            remedies.append(f"use a micro_batch_multiple of {multiple}")
            break
    if not spec.equal_count and spec.micro_batch_multiple == 1:
        n = sum(mini.cost.size for mini in minis)
        remedies.append(f"pad to {round_up(n, spec.dp_size * spec.num_mini_batches)} rows")
    rule = (
        f"hold a rank's {have} rows of a mini-batch in {fullest.num_columns} micro-batches, the most that "
        f"micro_batch_multiple = {spec.micro_batch_multiple} and equal_count = {spec.equal_count} allow"
    )
    return InfeasiblePlan(must("max_token_len_per_gpu", rule, spec.max_token_len_per_gpu, " or ".join(remedies)))


def _out_of_padded_room(minis: list[MiniBatch], spec: StepSpec) -> InfeasiblePlan:
    rows = max(int(mini.rows.max()) for mini in minis)
    rule = (
        f"hold a rank's {rows} rows of a mini-batch, padded to the longest of a micro-batch, in a multiple of "
        f"micro_batch_multiple = {spec.micro_batch_multiple} micro-batches"
    )
    remedy = "raise it or lower micro_batch_multiple"
    remedy += "" if spec.equal_count else " or pad so that ranks have equal rows"
    return InfeasiblePlan(must("max_token_len_per_gpu", rule, spec.max_token_len_per_gpu, remedy))
