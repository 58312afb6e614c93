"""What a plan must satisfy, always: drawn lengths and settings, one checker."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import event, given, settings
from hypothesis import strategies as st

from equipoise import EquipoiseWarning, InfeasiblePlan, StepPlan, StepSpec, plan_step
from equipoise.planning.step.composition import rank_rows
from tests.plan_checker import REL, check_plan, incoming_is_legal

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch and the settings to plan it with."""

    lengths: IntArray
    is_padding: npt.NDArray[np.bool_] | None
    spec: StepSpec

    def plan(self, **changes: Any) -> StepPlan:
        spec = dataclasses.replace(self.spec, **changes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseWarning)
            return plan_step(self.lengths, spec, is_padding=self.is_padding)

    def check(self, plan: StepPlan, **changes: Any) -> float:
        padding = None if self.is_padding is None else self.is_padding.tolist()
        spec = dataclasses.replace(self.spec, **changes)
        return check_plan(plan, self.lengths.tolist(), spec, is_padding=padding).lockstep_cost


def draw_lengths(kind: str, n: int, draw: np.random.Generator) -> IntArray:
    values = {
        "log-normal": lambda: np.clip(draw.lognormal(6.5, 1.0, n), 1, 8192),
        "million": lambda: np.clip(draw.lognormal(12.0, 1.5, n), 1, 1_000_000),
        "bimodal": lambda: np.where(draw.random(n) < 0.7, draw.integers(50, 201, n), draw.integers(800, 2049, n)),
        "equal": lambda: np.full(n, 700),
        "small": lambda: draw.integers(1, 6, n),
        "with zeros": lambda: draw.integers(0, 3, n) * draw.integers(1, 900, n),
        "one giant": lambda: np.where(np.arange(n) == n // 2, 100_000, draw.integers(1, 50, n)),
    }
    return values[kind]().astype(np.int64)


KINDS = st.sampled_from(["log-normal", "million", "bimodal", "equal", "small", "with zeros", "one giant"])
# from one row a micro-batch to no cap at all
TIGHTNESS = st.sampled_from([1.0, 1.0, 1.05, 1.5, 2.0, 4.0, 50.0, None])


@st.composite
def cases(draw: st.DrawFn, *, padding: bool = False, equal_count: bool = True, plain: bool = False) -> Case:
    dp = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32, 64]))
    steps = draw(st.sampled_from([1, 1, 2, 3, 4, 7, 16]))
    rows = draw(st.integers(1, 2 if dp * steps > 256 else 3 if dp * steps > 64 else 12))
    n = dp * steps * rows
    if not equal_count:
        n += draw(st.integers(0, dp * steps - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw_lengths(draw(KINDS), n, rng)
    flags = None
    if padding:
        flags = np.zeros(n, dtype=bool)
        num_padding = draw(st.integers(0, n - steps))
        where = draw(st.sampled_from(["end", "start", "anywhere"]))
        flags[
            {"end": np.arange(n - num_padding, n), "start": np.arange(num_padding)}.get(
                where, rng.permutation(n)[:num_padding]
            )
        ] = True
        if draw(st.booleans()):
            lengths[flags] = 2
    sp_size = draw(st.sampled_from([1, 1, 2, 3]))
    tightness = draw(TIGHTNESS)
    longest = max(int(lengths.max()), 1)
    cap = None if tightness is None else -(-int(longest * tightness) // sp_size)
    spec = StepSpec(
        dp_size=dp,
        num_mini_batches=steps,
        max_token_len_per_gpu=cap,
        sp_size=sp_size,
        micro_batch_multiple=1 if plain else draw(st.sampled_from([1, 1, 2, 3])),
        min_micro_batches=draw(st.integers(1, rows)) if plain else draw(st.sampled_from([1, 1, 2, 3, 5])),
        equal_count=equal_count,
        composition=draw(st.sampled_from(["keep", "stratified", "sorted"])),
        algorithm=draw(st.sampled_from(["refined", "refined", "kk", "lpt"])),
        seed=draw(st.integers(0, 3)),
    )
    return Case(lengths, flags, spec)


@st.composite
def tight_cases(draw: st.DrawFn) -> Case:
    """A few rows for which trying everything is quick, and a cap near the longest."""
    equal_count = draw(st.booleans())
    dp = draw(st.integers(1, 3))
    n = draw(st.integers(1, 8 // dp)) * dp + (0 if equal_count else draw(st.integers(0, dp - 1)))
    lengths = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    alone = draw(st.booleans())
    spec = StepSpec(
        dp_size=dp,
        max_token_len_per_gpu=max(1, int(max(lengths) * draw(st.sampled_from([0.5, 0.8] if alone else [1, 1.1, 1.5])))),
        micro_batch_multiple=draw(st.integers(1, 3)),
        min_micro_batches=draw(st.integers(1, 3)),
        equal_count=equal_count,
        algorithm=draw(st.sampled_from(["refined", "kk", "lpt"])),
        oversize="alone" if alone else "error",
    )
    return Case(np.array(lengths), None, spec)


def fits(case: Case) -> bool:
    """Whether any plan of one mini-batch is within the cap, by trying everything."""
    spec, lengths = case.spec, sorted(case.lengths.tolist(), reverse=True)
    rows = [len(lengths) // spec.dp_size + (rank < len(lengths) % spec.dp_size) for rank in range(spec.dp_size)]
    cap = spec.cap or 0

    def place(at: int, ranks: tuple[tuple[tuple[int, ...], ...], ...]) -> bool:
        """Rows from ``at`` on find a place, where ``ranks`` holds the rows of each micro-batch so far."""
        if at == len(lengths):
            return all(micro for rank in ranks for micro in rank)
        after = {
            (*ranks[:r], tuple(sorted((*rank[:m], (*micro, lengths[at]), *rank[m + 1 :]))), *ranks[r + 1 :])
            for r, rank in enumerate(ranks)
            if sum(map(len, rank)) < rows[r]
            for m, micro in enumerate(rank)
            if (not micro and spec.oversize == "alone") or sum(micro) + lengths[at] <= cap
        }
        return any(place(at + 1, ranks) for ranks in sorted(after))

    return any(
        place(0, (((),) * count,) * spec.dp_size)
        for count in range(spec.micro_batch_multiple, min(rows) + 1, spec.micro_batch_multiple)
        if count >= spec.min_micro_batches
    )


def plan_or_reason(case: Case) -> StepPlan | None:
    """The plan, or None after a look at the text of the error."""
    try:
        return case.plan()
    except InfeasiblePlan as error:
        text = str(error)
        assert " must " in text
        assert ", got " in text
        assert "; " in text
        event("infeasible")
        return None


@QUICK
@given(cases(plain=True))
def test_what_is_feasible_is_planned(case: Case) -> None:
    case.check(case.plan())


@QUICK
@given(cases())
def test_plans_with_a_multiple_keep_every_promise(case: Case) -> None:
    plan = plan_or_reason(case)
    if plan is not None:
        case.check(plan)


@QUICK
@given(cases(padding=True))
def test_plans_with_padding_keep_every_promise(case: Case) -> None:
    plan = plan_or_reason(case)
    if plan is not None:
        case.check(plan)


@QUICK
@given(cases(padding=True, equal_count=False))
def test_plans_of_uneven_ranks_keep_every_promise(case: Case) -> None:
    plan = plan_or_reason(case)
    if plan is not None:
        case.check(plan)


@QUICK
@given(cases(padding=True, plain=True), st.data())
def test_fixed_micro_batches_keep_every_promise(case: Case, data: st.DataObject) -> None:
    rows = case.lengths.size // (case.spec.dp_size * case.spec.num_mini_batches)
    size = data.draw(st.sampled_from([b for b in range(1, rows + 1) if rows % b == 0]))
    changes = {"max_token_len_per_gpu": None, "micro_batch_size_per_gpu": size, "min_micro_batches": 1}
    case.check(case.plan(**changes), **changes)


@QUICK
@given(cases(plain=True), st.floats(0.05, 0.9))
def test_oversize_rows_stand_alone(case: Case, share: float) -> None:
    cap = max(1, int(case.lengths.max() * share))
    changes = {"max_token_len_per_gpu": cap, "sp_size": 1, "oversize": "alone"}
    case.check(case.plan(**changes), **changes)


@QUICK
@given(st.one_of(cases(), cases(padding=True), cases(equal_count=False)))
def test_refined_never_costs_more_than_a_rule_alone_or_the_batch_as_it_came(case: Case) -> None:
    case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, algorithm="refined"))
    plan = plan_or_reason(case)
    if plan is None:
        return
    for rule in ("kk", "lpt"):
        try:
            rival = case.plan(algorithm=rule)
        except InfeasiblePlan:
            continue
        assert plan.stats.lockstep_cost <= rival.stats.lockstep_cost * (1 + REL), rule
    if incoming_is_legal(case.spec):
        assert plan.stats.lockstep_cost <= plan.incoming.lockstep_cost * (1 + REL)


@QUICK
@given(tight_cases())
def test_a_small_batch_is_refused_only_where_nothing_fits(case: Case) -> None:
    plan = plan_or_reason(case)
    assert (plan is not None) == fits(case)
    if plan is not None:
        case.check(plan)


@QUICK
@given(tight_cases())
def test_the_cap_that_a_refusal_names_is_enough(case: Case) -> None:
    try:
        case.plan()
    except InfeasiblePlan as error:
        if found := re.search(r"max_token_len_per_gpu must .* raise it to (\d+)", str(error)):
            cap = {"max_token_len_per_gpu": int(found[1])}
            assert int(found[1]) > (case.spec.max_token_len_per_gpu or 0)
            case.check(case.plan(**cap), **cap)


FRESH = """
import hashlib, numpy as np, equipoise as eq
digest = hashlib.sha256()
for seed, composition in ((0, "keep"), (1, "stratified"), (2, "sorted")):
    lengths = np.random.default_rng(seed).integers(1, 5000, 512)
    spec = eq.StepSpec(dp_size=8, num_mini_batches=4, max_token_len_per_gpu=20000, composition=composition, seed=seed)
    plan = eq.plan_step(lengths, spec, is_padding=np.arange(512) >= 500)
    parts = eq.partition(lengths, 7, group_ids=[f"uid {i % 40}" for i in range(512)])
    for array in (plan.order, *plan.sizes, *parts):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
print(digest.hexdigest())
"""


def test_every_process_makes_the_same_plan() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", FRESH],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 65


@QUICK
@given(st.one_of(cases(padding=True), cases(equal_count=False)))
def test_the_same_input_gives_the_same_plan(case: Case) -> None:
    first = plan_or_reason(case)
    if first is None:
        return
    second = case.plan()
    assert first.order.tobytes() == second.order.tobytes()
    assert [sizes.tolist() for sizes in first.sizes] == [sizes.tolist() for sizes in second.sizes]


@QUICK
@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 15), st.floats(0, 1)), min_size=1, max_size=6),
    st.booleans(),
)
def test_ranks_get_their_rows_and_their_real_rows_evenly(
    dp: int, steps: list[tuple[int, int, float]], even: bool
) -> None:
    sizes = np.array([dp * rows + (0 if even else extra % dp) for rows, extra, _ in steps])
    real = np.array([max(1, int(size * share)) for size, (_, _, share) in zip(sizes.tolist(), steps, strict=True)])
    rows, real_rows = rank_rows(sizes, real, dp)
    assert rows.sum(axis=1).tolist() == sizes.tolist()
    assert real_rows.sum(axis=1).tolist() == real.tolist()
    assert (real_rows <= rows).all()
    for counts in (rows, real_rows):
        assert (counts.max(axis=1) - counts.min(axis=1)).max() <= 1
    assert np.ptp(rows.sum(axis=0)) <= 1
    if even:
        assert np.ptp(real_rows.sum(axis=0)) <= 1
