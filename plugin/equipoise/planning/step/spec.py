"""What a plan must satisfy: the trainer's settings in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from equipoise._checks import is_whole, positive
from equipoise.errors import InvalidInput, must, nearest

Algorithm = Literal["refined", "kk", "lpt"]
Composition = Literal["keep", "stratified", "sorted"]
Objective = Literal["lockstep", "rank"]
Oversize = Literal["error", "alone"]
KeepGroups = Literal["none", "rank", "micro"]

_COUNTS = {
    "dp_size": "pass the number of data-parallel ranks",
    "num_mini_batches": "pass the optimizer steps of one trainer step",
    "sp_size": "use 1 without sequence parallelism",
    "micro_batch_multiple": "use 1 without an interleaved pipeline",
    "min_micro_batches": "use 1 unless a pipeline needs more",
    "max_token_len_per_gpu": "pass the tokens that one GPU can hold",
    "micro_batch_size_per_gpu": "pass the rows of one micro-batch",
}
_OPTIONAL = ("max_token_len_per_gpu", "micro_batch_size_per_gpu")


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """The settings of one trainer step that a plan depends on.

    Args:
        dp_size: data-parallel ranks.
        num_mini_batches: optimizer steps that the batch is split into.
        max_token_len_per_gpu: the most tokens per GPU in a micro-batch; None for no cap.
        micro_batch_size_per_gpu: rows of each micro-batch, instead of the cap.
        sp_size: GPUs that share a row's tokens (Ulysses); the cap of a rank is ``max_token_len_per_gpu * sp_size``.
        micro_batch_multiple: the number of micro-batches is a multiple of this (interleaved pipelines).
        min_micro_batches: the fewest micro-batches of a mini-batch on a rank.
        equal_count: every rank gets the same number of rows in each mini-batch. False: counts differ by at most 1.
        composition: "keep" cuts mini-batches from the batch in its incoming order; "stratified" gives each the same mix
            of lengths; "sorted" gives the longest rows to the first, and so on. Sorted steps cost least but bias
            training: long rows always come before short ones (``docs/composition.md``).
        objective: what to minimize: "lockstep" (ranks synchronize at each micro-batch) or "rank" (once per optimizer
            step).
        micro_batch_overhead: fixed cost of a micro-batch, in the units of the cost model. The plan uses more than the
            fewest micro-batches only if that saves more than their overhead.
        algorithm: "refined" (a search), "kk" or "lpt".
        oversize: what to do with a row above the cap: "error", or "alone" in its own micro-batch.
        keep_groups: "rank" keeps the rows of a group (``group_ids`` of :func:`equipoise.plan_step`) on one rank,
            "micro" in one micro-batch. Both apply within each mini-batch, and the composition may split a group across
            mini-batches. Groups may have any size; each rank still gets exactly its rows.
        seed: seed for "stratified" composition.

    Raises:
        InvalidInput: a value breaks its rule, or two settings conflict.

    >>> StepSpec(dp_size=8, num_mini_batches=4, max_token_len_per_gpu=16384, sp_size=2).cap
    32768
    """

    dp_size: int
    num_mini_batches: int = 1
    max_token_len_per_gpu: int | None = None
    micro_batch_size_per_gpu: int | None = None
    sp_size: int = 1
    micro_batch_multiple: int = 1
    min_micro_batches: int = 1
    equal_count: bool = True
    composition: Composition = "keep"
    objective: Objective = "lockstep"
    micro_batch_overhead: float = 0.0
    algorithm: Algorithm = "refined"
    oversize: Oversize = "error"
    keep_groups: KeepGroups = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for field, remedy in _COUNTS.items():
            value = getattr(self, field)
            if value is not None or field not in _OPTIONAL:  # numpy's integers would overflow in products
                object.__setattr__(self, field, positive(field, value, remedy))
        if self.micro_batch_size_per_gpu is not None and self.max_token_len_per_gpu is not None:
            rule, remedy = "be None when max_token_len_per_gpu is given", "choose fixed micro-batches or the token cap"
            raise InvalidInput(must("micro_batch_size_per_gpu", rule, self.micro_batch_size_per_gpu, remedy))
        if not is_whole(self.seed):
            raise InvalidInput(must("seed", "be a whole number of at least 0", self.seed, "use 0"))
        overhead: Any = self.micro_batch_overhead
        if not isinstance(overhead, (int, float)) or isinstance(overhead, bool) or not 0 <= overhead < float("inf"):
            rule = "be a number of at least 0"
            raise InvalidInput(must("micro_batch_overhead", rule, overhead, "use 0 where micro-batches cost nothing"))
        if self.equal_count not in (True, False):
            raise InvalidInput(must("equal_count", "be True or False", self.equal_count, "use True for equal rows"))
        choices = {
            "algorithm": Algorithm,
            "composition": Composition,
            "oversize": Oversize,
            "objective": Objective,
            "keep_groups": KeepGroups,
        }
        for field, options in choices.items():
            value = getattr(self, field)
            if value not in get_args(options):
                rule = f"be one of {list(get_args(options))}"
                raise InvalidInput(must(field, rule, value, nearest(str(value), get_args(options))))

    @property
    def cap(self) -> int | None:
        """The most tokens in one micro-batch of a rank; None for no cap."""
        return None if self.max_token_len_per_gpu is None else self.max_token_len_per_gpu * self.sp_size
