"""How long planning takes, and how that grows: Equipoise beside what verl 0.9.1 computes at the same lengths."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# verl is typed in part only.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from benchmarks.cases import Case, Size
from benchmarks.clock import Clock, OverBudget, budget
from benchmarks.lengths import draw
from benchmarks.planners import OURS, Planner, is_ours
from benchmarks.rules.verl import deal, driver_time, pack_together, workload
from equipoise.errors import EquipoiseError

GROWTH = tuple(
    Size.parse(text) for text in ("2048x32x4", "4096x64x4", "8192x128x4", "16384x256x8", "32768x512x8", "65536x512x8")
)
QUICK_GROWTH = (GROWTH[0], GROWTH[-1])
CAP = 32768
TIGHT = f"{OURS}, cap at the longest row"
VERL_DRIVER = "verl, driver as shipped"
VERL_LISTS = "verl, driver on plain integers"
VERL_RANK = "verl, engine of one rank"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Processor milliseconds of one planner at one size; ``skipped`` says why there are none."""

    size: str
    planner: str
    ms: float | None = None
    least_ms: float | None = None
    most_ms: float | None = None
    skipped: str = ""


def timings(
    sizes: tuple[Size, ...],
    planners: Mapping[str, Planner],
    *,
    repeats: int,
    budget_s: float,
    tick: Callable[[str], None],
) -> list[Timing]:
    """Time Equipoise's planners and verl's parts on the log-normal set with a cap of 32768 tokens.

    The default planner is timed under the tightest cap as well, where planning takes longest.
    """
    found: list[Timing] = []
    for size in sizes:
        lengths: list[int] = draw("lognormal", size.rows, 0).tolist()
        case = Case(length_set="lognormal", size=size, cap="loose", seed=0, lengths=lengths, max_token_len=CAP)
        tight = dataclasses.replace(case, cap="tight", max_token_len=max(lengths))
        parts = [(name, planner, case, repeats) for name, planner in planners.items() if is_ours(name)]
        parts.append((TIGHT, planners[OURS], tight, repeats))
        parts += [(name, part, case, 1) for name, part in VERL.items()]
        for name, part, one, times in parts:
            tick(f"{size} {name}")
            found.append(_time(one, name, part, times, budget_s))
    return found


def _time(case: Case, name: str, run: Callable[[Case, Clock], object], repeats: int, budget_s: float) -> Timing:
    times: list[float] = []
    try:
        for _ in range(repeats):
            with budget(budget_s):
                clock = Clock()
                run(case, clock)
                times.append(1000 * clock.step_s)
    except (OverBudget, EquipoiseError) as reason:
        return Timing(size=str(case.size), planner=name, skipped=str(reason))
    return Timing(size=str(case.size), planner=name, ms=median(times), least_ms=min(times), most_ms=max(times))


def _driver(case: Case, clock: Clock) -> None:
    driver_time(case.lengths, case.size.dp_size, clock)


def _driver_on_lists(case: Case, clock: Clock) -> list[list[int]]:
    with clock.driver():
        return deal([workload(length) for length in case.lengths], case.size.dp_size)


def _rank(case: Case, clock: Clock) -> None:
    """Micro-batches of rank 0, summed over mini-batches, as if the other ranks had its rows.

    Ranks plan side by side. Where another rank needs more micro-batches, rank 0 would compute more partitions than
    here; so this is the least that verl's engine spends.
    """
    share = _driver_on_lists(case, Clock())[0]
    size = len(share) // case.size.num_mini_batches
    with clock.ranks(1):
        for start in range(0, len(share), size):
            pack_together([share[start : start + size]], case.lengths, case.max_token_len)


VERL: Mapping[str, Callable[[Case, Clock], object]] = {
    VERL_DRIVER: _driver,
    VERL_LISTS: _driver_on_lists,
    VERL_RANK: _rank,
}
