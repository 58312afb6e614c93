"""The stages of the search, each with what replaces it when it is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.planning.partition.board import Boards

STEPS = ("small", "large", "few", "objective", "fixed", "compared", "barely", "groups")
SHARES = ("groups",)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        name: what the table calls it.
        families: first words of the families of cases that it can affect.
        patches: names below ``equipoise.planning``, and what replaces them.
    """

    name: str
    families: tuple[str, ...]
    patches: tuple[tuple[str, Any], ...]

    def takes_part_in(self, family: str) -> bool:
        """Whether it can affect plans of this family."""
        return family.startswith(self.families)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _first(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _stop(*_: Any, **__: Any) -> bool:
    return False


_EVEN_OUT = Boards.even_out


def _no_pairs(kind: str) -> Callable[..., int]:
    def even_out(boards: Boards, *args: Any, pairs: Any, **options: Any) -> int:
        if pairs == kind and boards.num_columns > 1:
            return 0
        return _EVEN_OUT(boards, *args, pairs=pairs, **options)

    return even_out


def _one_level(boards: Boards) -> Any:
    """The mean load as the target of every cell, whatever the longest row of its column."""
    mean = boards.load.sum(axis=1) / boards.num_cells
    return np.repeat(mean[:, None], boards.num_cells, axis=1)


def _stage(name: str, families: tuple[str, ...], *patches: tuple[str, Any]) -> Stage:
    return Stage(name=name, families=families, patches=patches)


_PAIRS = "partition.board.Boards.even_out"
STAGES = (
    _stage("rounds of pairs", STEPS, ("step.search.even_out_loads", _nothing)),
    _stage("pairs in a column", STEPS, (_PAIRS, _no_pairs("column"))),
    _stage("pairs in a rank", STEPS, (_PAIRS, _no_pairs("rank"))),
    _stage("pairs of any cells", STEPS, (_PAIRS, _no_pairs("any"))),
    _stage("level by column", STEPS, ("partition.board.Boards.targets", _one_level)),
    _stage("exact steps", STEPS, ("step.search.polish", _nothing)),
    _stage("kicks", STEPS, ("step.search.kick", _nothing)),
    _stage("fit: rounds", STEPS, ("partition.refine.fit_cap.__kwdefaults__", {"max_rounds": 0})),
    _stage("start by tiers", STEPS, ("step.starts._FEW_ROWS", 0)),
    _stage("plain rules", (*STEPS, "padded"), ("step.search._by_rule", _nothing)),
    _stage("roomiest layout", (*STEPS, "lpt"), ("step.search._roomiest", _nothing)),
    _stage("levelled ranks", ("objective",), ("step.search.level_ranks", _nothing)),
    _stage("levelled shares", SHARES, ("step.groups.level_shares", _first)),
    _stage("levelled shares: pairs", SHARES, ("partition.shares.even_out_loads", _nothing)),
    _stage("shares: trades", SHARES, ("partition.shares._trade", _nothing)),
    _stage("shares: exhaustive", SHARES, ("partition.shares._exhaustive", _nothing)),
    _stage("best cuts", ("padded",), ("step.tiers._MAX_POSITIONS", 0)),
    _stage("descent", ("padded",), ("step.tiers._Descent.sweep", _stop)),
    _stage("pack: search for fewer groups", ("pack",), ("partition.pack._fitted", _nothing)),
    _stage("pack: start by weight", ("pack",), ("partition.pack._widest_room", _nothing)),
    _stage("pack: exact steps", ("pack",), ("partition.pack.polish", _nothing)),
)
