"""Errors for groups that cannot be kept whole: which settings conflict, and what would work."""

from __future__ import annotations

from equipoise._arrays import IntArray
from equipoise.errors import InfeasiblePlan
from equipoise.planning.step.spec import StepSpec


def check_group_tokens(tokens: IntArray, size: IntArray, j: int, spec: StepSpec) -> None:
    """Raise if a group that must be in one micro-batch is above the cap; single rows may be (``oversize="alone"``)."""
    if spec.cap is None:
        return
    over = (tokens > spec.cap) & (size > 1)
    if over.any():
        most = int(tokens[over].max())
        groups = f"{int(over.sum())} groups above it in mini-batch {j}, the largest with {most} tokens"
        remedies = [f"raise max_token_len_per_gpu to {-(-most // spec.sp_size)}", 'use keep_groups="rank"']
        rule = f"hold each group in one micro-batch of at most {spec.cap} tokens, the cap"
        raise _refused(rule, groups, spec, remedies)


def no_shares(
    size: IntArray, room: IntArray, j: int, spec: StepSpec, *, padded: int | None, loose: str
) -> InfeasiblePlan:
    """The error for groups that do not add up to the rows of each rank (or fixed micro-batch).

    ``padded`` is the size of a batch with more padding that would work (None for none), ``loose`` the strictest value
    of ``keep_groups`` that does not fail in this way.
    """
    each = str(int(room.min())) if room.min() == room.max() else f"{int(room.min())} or {int(room.max())}"
    fixed = spec.keep_groups == "micro" and spec.micro_batch_size_per_gpu is not None
    what = f"{room.size} micro-batches" if fixed else f"dp_size = {spec.dp_size} ranks"
    remedies = [] if padded is None else [f"pad to {padded} rows"]
    remedies.append(f'use keep_groups="{loose}"')
    return _refused(f"fill {what} of {each} rows each with whole groups of mini-batch {j}", _text(size), spec, remedies)


def no_columns(size: IntArray, j: int, spec: StepSpec) -> InfeasiblePlan:
    """The error for groups that fit on ranks, but not into micro-batches under the cap and the required counts."""
    rule = (
        f"leave as many micro-batches on every rank of mini-batch {j} as max_token_len_per_gpu = "
        f"{spec.max_token_len_per_gpu}, min_micro_batches = {spec.min_micro_batches} and micro_batch_multiple = "
        f"{spec.micro_batch_multiple} ask for"
    )
    counts = "raise max_token_len_per_gpu" if spec.cap else "lower min_micro_batches or micro_batch_multiple"
    loose = 'use keep_groups="rank" or "none"' if spec.keep_groups == "micro" else 'use keep_groups="none"'
    return _refused(rule, _text(size), spec, [counts, loose])


def _refused(rule: str, groups: str, spec: StepSpec, remedies: list[str]) -> InfeasiblePlan:
    return InfeasiblePlan(f"keep_groups must {rule}, got {spec.keep_groups!r} with {groups}; {' or '.join(remedies)}")


def _text(size: IntArray) -> str:
    if not size.size:
        return "no groups"
    rows = f"{size.min()} rows" if size.min() == size.max() else f"{size.min()} to {size.max()} rows"
    return f"{size.size} groups of {rows}"
