"""Plans that keep groups whole: every promise of a plan, and the groups."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import event, given, settings
from hypothesis import strategies as st

from equipoise import EquipoiseWarning, InfeasiblePlan, StepPlan, StepSpec, plan_step
from equipoise.planning.partition.shares import level_shares, share_out
from tests.plan_checker import REL, check_plan

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
IntArray = npt.NDArray[np.int64]


def check_groups(plan: StepPlan, ids: Sequence[Hashable], is_padding: Sequence[bool] | None) -> None:
    """No group is in two places within a mini-batch."""
    where: dict[tuple[Hashable, int], set[tuple[int, ...]]] = {}
    for rank in range(plan.dp_size):
        for j, micro_batches in enumerate(plan.micro_batches(rank)):
            for m, rows in enumerate(micro_batches):
                for row in rows.tolist():
                    if is_padding is None or not is_padding[row]:
                        place = (rank, m) if plan.spec.keep_groups == "micro" else (rank,)
                        where.setdefault((ids[row], j), set()).add(place)
    split = {key: places for key, places in where.items() if len(places) > 1}
    assert not split, f"groups in several places: {split}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of groups and the settings to plan it with."""

    lengths: IntArray
    ids: list[str]
    is_padding: list[bool] | None
    spec: StepSpec

    def plan(self, **changes: Any) -> StepPlan:
        spec = dataclasses.replace(self.spec, **changes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseWarning)
            return plan_step(self.lengths, spec, group_ids=self.ids, is_padding=self.is_padding)

    def check(self, plan: StepPlan) -> float:
        check_groups(plan, self.ids, self.is_padding)
        return check_plan(plan, self.lengths.tolist(), plan.spec, is_padding=self.is_padding).lockstep_cost

    def plan_or_reason(self, **changes: Any) -> StepPlan | None:
        """The plan, or None after a look at the text of the error."""
        try:
            return self.plan(**changes)
        except InfeasiblePlan as error:
            text = str(error)
            assert all(part in text for part in (" must ", ", got ", "; ")), text
            event(f"infeasible: {text.split()[0]}")
            return None


@st.composite
def cases(draw: st.DrawFn, *, equal_count: bool = True) -> Case:
    dp, steps = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 1, 2, 4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(1, 6))
    sizes = (
        rng.integers(1, size + 1, draw(st.integers(1, 40))) if draw(st.booleans()) else np.full(dp * steps * 3, size)
    )
    ids: list[str] = [f"uid {g}" for g, rows in enumerate(sizes.tolist()) for _ in range(rows)]
    if draw(st.booleans()):
        order: list[int] = rng.permutation(len(ids)).tolist()
        ids = [ids[row] for row in order]
    n = len(ids)
    missing = -n % (dp * steps) if equal_count else max(0, dp * steps - n)
    pads = missing + draw(st.sampled_from([0, 0, dp * steps, 3 * dp * steps]))
    lengths = np.clip(rng.lognormal(6.5, 1.0, n + pads), 1, 8192).astype(np.int64)
    lengths[n:] = 2
    flags = [False] * n + [True] * pads
    tightness = draw(st.sampled_from([None, 1.0, 1.5, 3.0, 10.0]))
    spec = StepSpec(
        dp_size=dp,
        num_mini_batches=steps if n >= steps else 1,
        max_token_len_per_gpu=None if tightness is None else int(int(lengths.max()) * tightness),
        micro_batch_multiple=draw(st.sampled_from([1, 1, 1, 2])),
        min_micro_batches=draw(st.sampled_from([1, 1, 2])),
        equal_count=equal_count,
        composition=draw(st.sampled_from(["keep", "stratified", "sorted"])),
        algorithm=draw(st.sampled_from(["refined", "refined", "kk", "lpt"])),
        keep_groups=draw(st.sampled_from(["rank", "micro"])),
    )
    return Case(lengths, ids + ["pad"] * pads, flags if pads else None, spec)


@QUICK
@given(st.one_of(cases(), cases(equal_count=False)))
def test_groups_stay_whole_and_every_promise_is_kept(case: Case) -> None:
    plan = case.plan_or_reason()
    if plan is not None:
        case.check(plan)
        event(case.spec.keep_groups)


@QUICK
@given(cases(), st.integers(1, 4))
def test_groups_stay_whole_in_fixed_micro_batches(case: Case, size: int) -> None:
    plan = case.plan_or_reason(
        max_token_len_per_gpu=None, micro_batch_size_per_gpu=size, min_micro_batches=1, micro_batch_multiple=1
    )
    if plan is not None:
        case.check(plan)
        event(case.spec.keep_groups)


@QUICK
@given(st.one_of(cases(), cases(equal_count=False)))
def test_refined_never_costs_more_than_greedy(case: Case) -> None:
    plain = case.plan_or_reason(algorithm="lpt")
    if plain is not None:
        assert case.plan(algorithm="refined").stats.lockstep_cost <= plain.stats.lockstep_cost * (1 + REL)


@QUICK
@given(cases())
def test_the_same_groups_give_the_same_plan(case: Case) -> None:
    first = case.plan_or_reason()
    if first is not None:
        renamed = dataclasses.replace(case, ids=[f"another {name}" for name in case.ids])
        assert renamed.plan().order.tobytes() == first.order.tobytes()


@st.composite
def shares(draw: st.DrawFn) -> tuple[IntArray, IntArray]:
    """Groups and bins that they fill but for a few rows."""
    rooms = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    sizes: list[int] = []
    for room in rooms:
        left = room - draw(st.integers(0, 1))
        while left:
            sizes.append(draw(st.integers(1, left)))
            left -= sizes[-1]
    return np.array(draw(st.permutations(sizes)), dtype=np.int64), np.array(rooms)


@QUICK
@given(shares(), st.integers(0, 9))
def test_shares_that_exist_are_found(case: tuple[IntArray, IntArray], seed: int) -> None:
    size, room = case
    if not size.size:
        return
    cost = np.random.default_rng(seed).lognormal(0, 1, size.size)
    part = share_out(size, cost, room)
    assert part is not None
    levelled = level_shares(part, size, cost, room)
    for one in (part, levelled):
        assert (np.bincount(one, weights=size, minlength=room.size) <= room).all()
    tops = [np.bincount(one, weights=cost, minlength=room.size).max() for one in (part, levelled)]
    assert tops[1] <= tops[0] * (1 + REL)
