"""The plan: read-only integer arrays, their cost, and the bounds on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from equipoise._arrays import IntArray
from equipoise.errors import InvalidInput, must
from equipoise.planning.step.layout import Layout
from equipoise.planning.step.spec import StepSpec


@dataclass(frozen=True, kw_only=True)
class PlanStats:
    """What a plan costs, in the units of its cost model.

    Attributes:
        lockstep_cost: Σ over micro-batches of the most expensive rank: ranks synchronize at each micro-batch.
        rank_cost: Σ over mini-batches of the most expensive rank: ranks synchronize once per optimizer step.
        bound: Σ over mini-batches of max(mean cost of a rank, cost of the longest row): a lower bound on both costs of
            any plan of these mini-batches.
        tight_bound: a lower bound on the lockstep cost that also knows the cap and the equal row counts (see
            :mod:`equipoise.planning.partition.bounds`).
        ideal: Σ over mini-batches of the mean cost of a rank.
        efficiency: tight_bound / lockstep_cost, at most 1.
        max_tokens: tokens of the fullest micro-batch, padding included if the cost model pads.
        num_micro_batches: micro-batches that one rank runs in the whole step.
        num_padding: padding rows.
    """

    lockstep_cost: float
    rank_cost: float
    bound: float
    tight_bound: float
    ideal: float
    max_tokens: int
    num_micro_batches: int
    num_padding: int

    @classmethod
    def of(cls, layouts: list[Layout], tight_bound: float) -> PlanStats:
        """Statistics of the mini-batches' layouts, given the sum of their tight bounds.

        For rows that are padded, ideal and bounds use the costs of single rows; padding only adds to them.
        """
        minis = [layout.mini for layout in layouts]
        means = [float(mini.cost.sum()) / mini.dp_size for mini in minis]
        bound = sum(max(mean, float(mini.cost.max())) for mean, mini in zip(means, minis, strict=True))
        return cls(
            lockstep_cost=sum(layout.lockstep() for layout in layouts),
            rank_cost=sum(layout.rank() for layout in layouts),
            bound=bound,
            tight_bound=max(bound, tight_bound),
            ideal=sum(means),
            max_tokens=max(int(layout.tokens().max()) for layout in layouts),
            num_micro_batches=sum(layout.num_columns for layout in layouts),
            num_padding=sum(int(mini.padding.sum()) for mini in minis),
        )

    @property
    def efficiency(self) -> float:
        """Tight bound / lockstep cost; 1 if both are 0."""
        return min(1.0, self.tight_bound / self.lockstep_cost) if self.lockstep_cost > 0 else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """Which row goes to which mini-batch, rank and micro-batch.

    Attributes:
        spec: the settings that the plan satisfies.
        order: row ids in dispatch order, shape (n,): rank-major, then mini-batch, then micro-batch.
        sizes: rows of each micro-batch, a tuple over mini-batches of arrays of shape (dp_size, micro-batches).
        num_real_rows: rows of each mini-batch without padding, shape (num_mini_batches,).
        stats: what the plan costs.
        incoming: the same statistics for the batch in its incoming order (see :func:`plan_step`).
    """

    spec: StepSpec
    order: IntArray
    sizes: tuple[IntArray, ...]
    num_real_rows: IntArray
    stats: PlanStats
    incoming: PlanStats

    @cached_property
    def inverse(self) -> IntArray:
        """Position of each row in the dispatch order: ``order[inverse]`` is 0 … n - 1."""
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(self.order.size)
        inverse.flags.writeable = False
        return inverse

    @property
    def dp_size(self) -> int:
        """Number of ranks."""
        return self.spec.dp_size

    @property
    def num_mini_batches(self) -> int:
        """Number of optimizer steps."""
        return len(self.sizes)

    @property
    def num_micro_batches(self) -> tuple[int, ...]:
        """Number of micro-batches in each mini-batch, the same on every rank."""
        return tuple(sizes.shape[1] for sizes in self.sizes)

    @cached_property
    def rows_per_rank(self) -> IntArray:
        """Number of rows on each rank, shape (dp_size,)."""
        return np.sum([sizes.sum(axis=1) for sizes in self.sizes], axis=0)

    def rank_rows(self, rank: int) -> IntArray:
        """Row ids of ``rank`` in dispatch order."""
        if not 0 <= rank < self.dp_size:
            raise InvalidInput(must("rank", f"be from 0 to {self.dp_size - 1}", rank, "pass a data-parallel rank"))
        start = int(self.rows_per_rank[:rank].sum())
        return self.order[start : start + int(self.rows_per_rank[rank])]

    def micro_batches(self, rank: int) -> list[list[IntArray]]:
        """Row ids of each micro-batch of ``rank``, as [mini-batch][micro-batch].

        Raises:
            InvalidInput: there is no such rank.
        """
        rows = self.rank_rows(rank)
        sizes = np.concatenate([sizes[rank] for sizes in self.sizes])
        flat = iter(np.split(rows, np.cumsum(sizes)[:-1]))
        return [list(islice(flat, count)) for count in self.num_micro_batches]

    def metrics(self, prefix: str = "balance/") -> dict[str, float]:
        """Flat metrics for a tracker; those of the incoming order end in ``_incoming``.

        ``lockstep_over_bound`` and ``rank_over_bound`` are 1 at best. ``idle_share`` is the share of time that ranks
        spend waiting for the slowest one.
        """
        figures: dict[str, float] = {}
        for suffix, stats in (("", self.stats), ("_incoming", self.incoming)):
            lockstep, rank, bound = stats.lockstep_cost, stats.rank_cost, stats.bound
            figures[f"{prefix}lockstep_over_bound{suffix}"] = lockstep / bound if bound else 1.0
            figures[f"{prefix}rank_over_bound{suffix}"] = rank / bound if bound else 1.0
            figures[f"{prefix}idle_share{suffix}"] = 1 - stats.ideal / lockstep if lockstep else 0.0
            figures[f"{prefix}max_tokens{suffix}"] = float(stats.max_tokens)
            figures[f"{prefix}num_micro_batches{suffix}"] = float(stats.num_micro_batches)
        figures[f"{prefix}efficiency"] = self.stats.efficiency
        figures[f"{prefix}num_padding"] = float(self.stats.num_padding)
        return figures
