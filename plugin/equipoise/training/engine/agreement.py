"""The requested micro-batches, and how ranks agree on their number in one collective, which also carries errors."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from equipoise._checks import positive
from equipoise.errors import InfeasiblePlan, InvalidInput, must, nearest
from equipoise.together import gather_numbers

CAP = "max_token_len (max_token_len_per_gpu of an engine, × sp_size)"
"""The settings that determine the cap, for errors."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The requested micro-batches, the same on all ranks."""

    cap: int | None
    rows: int | None
    together: int
    multiple: int
    least: int
    fill: bool
    alone: bool

    @classmethod
    def of(
        cls,
        *,
        planned: bool = False,
        max_token_len: int | None,
        micro_batch_size: int | None,
        sp_size: int,
        force_group_size: int,
        multiple: int = 1,
        min_micro_batches: int = 1,
        on_shortage: str,
        oversize: str,
    ) -> Ask:
        """Check the arguments of :func:`equipoise.prepare_micro_batches`.

        Raises:
            InvalidInput: an argument breaks its rule, or two of them conflict.
        """
        for field, value in (("max_token_len", max_token_len), ("micro_batch_size", micro_batch_size)):
            if value is not None:
                positive(field, value, "pass what one micro-batch holds")
        ask = cls(
            cap=None
            if max_token_len is None
            else int(max_token_len) * positive("sp_size", sp_size, "use 1 without it"),
            rows=micro_batch_size,
            together=positive("force_group_size", force_group_size, "use 1 for rows that may be separated"),
            multiple=positive("multiple", multiple, "use 1 for any count"),
            least=positive("min_micro_batches", min_micro_batches, "use 1 for as few as fit"),
            fill=_choice("on_shortage", on_shortage, ("error", "zero_weight")) == "zero_weight",
            alone=_choice("oversize", oversize, ("error", "alone")) == "alone",
        )
        if planned:
            if (ask.cap, ask.rows, ask.together, ask.multiple, ask.least) != (None, None, 1, 1, 1):
                remedy = "put them into the plan's StepSpec (keep_groups for groups)"
                raise InvalidInput(must("settings of micro-batches", "be left out with a plan", "both", remedy))
        elif (ask.cap is None) == (ask.rows is None):
            got = {"max_token_len": max_token_len, "micro_batch_size": micro_batch_size}
            raise InvalidInput(must("plan, max_token_len, micro_batch_size", "be exactly one", got, "pass one of them"))
        elif ask.rows is not None and ask.rows % ask.together:
            rule = f"be a multiple of force_group_size = {ask.together}"
            raise InvalidInput(must("micro_batch_size", rule, ask.rows, "count rows, not groups"))
        return ask


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a rank tells the others before any of them continues.

    Attributes:
        count: micro-batches that its rows need.
        most: micro-batches that its rows can fill.
        settings: checksum of the request.
    """

    count: int
    most: int
    settings: int


def checksum(*settings: Any) -> int:
    """A checksum of settings, to compare them between ranks."""
    return zlib.crc32(repr(settings).encode())


def agree(part: Callable[[], Need], group: Any) -> list[Need]:
    """The needs of all ranks of ``group``, by rank; one all-gather, none for a single rank.

    Raises:
        InvalidInput: settings differ.
        EquipoiseError: ``part`` raised it on some rank; raised on every rank.
    """
    rows = gather_numbers(lambda: astuple(part()), count=3, group=group, doing="splitting rows into micro-batches")
    needs = [Need(count=count, most=most, settings=settings) for count, most, settings in rows]
    others = [rank for rank, need in enumerate(needs) if need.settings != needs[0].settings]
    if others:
        rule = "be the same on all ranks"
        raise InvalidInput(must("micro-batch settings", rule, f"others on ranks {others} than on 0", "fix the config"))
    return needs


def raise_shortage(needs: list[Need], count: int, *, multiple: int) -> None:
    """Raise if a rank cannot fill ``count`` micro-batches.

    Raises:
        InfeasiblePlan: it cannot; names the rank, on every rank.
    """
    for rank, need in enumerate(needs):
        if need.most < count:
            rule = (
                f"fill {count} micro-batches, as many as other ranks, min_micro_batches or multiple = {multiple} need"
            )
            remedy = f'raise {CAP}, balance rows with a plan, or pass on_shortage="zero_weight"'
            raise InfeasiblePlan(must(f"rows of rank {rank}", rule, f"enough for {need.most}", remedy))


def _choice(field: str, value: str, options: tuple[str, ...]) -> str:
    if value not in options:
        raise InvalidInput(must(field, f"be one of {list(options)}", value, nearest(str(value), options)))
    return value
