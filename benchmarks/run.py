"""Run planners over cases, each within a budget of processor time, and keep what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.clock import Clock, OverBudget, budget
from benchmarks.lengths import TraceMissing, draw
from benchmarks.measure import Figures, measure
from benchmarks.planners import Planner
from equipoise.errors import EquipoiseError

BRIEF_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one planner did with one case.

    Attributes:
        cell: length set, size and cap.
        seed: of the draw.
        planner: its name.
        figures: what the layout costs; None where there is none.
        ms: processor milliseconds of each repeat, of the driver and one rank.
        skipped: why there is no layout.

    """

    cell: str
    seed: int
    planner: str
    figures: Figures | None = None
    ms: Sequence[float] = ()
    skipped: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "", ())}


@dataclass
class Run:
    """Records of a run, in the order in which they were made."""

    records: list[Record] = field(default_factory=list[Record])

    def cells(self) -> list[str]:
        """Cells in the order of the run."""
        return list(dict.fromkeys(record.cell for record in self.records))

    def planners(self) -> list[str]:
        """Planners in the order of the run."""
        return list(dict.fromkeys(record.planner for record in self.records))

    def of(self, cell: str, planner: str) -> list[Record]:
        """Records of one planner in one cell, one for each seed."""
        return [record for record in self.records if (record.cell, record.planner) == (cell, planner)]


def available(sets: Iterable[str], say: Callable[[str], None]) -> list[str]:
    """The length sets that can be drawn; of the others it says why not."""
    found: list[str] = []
    for name in sets:
        try:
            draw(name, 1, 0)
        except TraceMissing as missing:
            say(f"length set {name!r} is left out: {missing}")
        else:
            found.append(name)
    return found


def run_cases(
    cases: Iterable[Case],
    planners: Mapping[str, Planner],
    *,
    repeats: int,
    budget_s: float,
    tick: Callable[[Case, str], None],
) -> Run:
    """Run all planners on each case, one right after the other.

    A planner that was over its budget once is not tried again at the same size; the record says so.

    Args:
        cases: what to plan.
        planners: by name.
        repeats: how often a plan that takes less than 50 ms in all is timed, at most.
        budget_s: processor seconds that a planner may use on one case, ranks one after the other.
        tick: called before each planner.

    """
    run = Run()
    over: dict[tuple[str, str], str] = {}
    for case in cases:
        for name, planner in planners.items():
            tick(case, name)
            key = (str(case.size), name)
            if key in over:
                run.records.append(Record(cell=case.cell, seed=case.seed, planner=name, skipped=over[key]))
                continue
            record = _one(case, name, planner, repeats, budget_s)
            if record.skipped.startswith("over "):
                over[key] = f"{record.skipped} at {case.cell}, seed {case.seed}"
            run.records.append(record)
    return run


def _one(case: Case, name: str, planner: Planner, repeats: int, budget_s: float) -> Record:
    times: list[float] = []
    try:
        with budget(budget_s):
            clock = Clock()
            layout = planner(case, clock)
            times.append(clock.step_s)
            while len(times) < repeats and sum(times) < BRIEF_S:
                clock = Clock()
                planner(case, clock)
                times.append(clock.step_s)
    except (OverBudget, EquipoiseError) as reason:
        return Record(cell=case.cell, seed=case.seed, planner=name, skipped=str(reason))
    figures = measure(
        layout, case.lengths, num_mini_batches=case.size.num_mini_batches, max_token_len=case.max_token_len
    )
    return Record(cell=case.cell, seed=case.seed, planner=name, figures=figures, ms=[1000 * time for time in times])


def mean(records: Iterable[Record], figure: str) -> float | None:
    """Mean over seeds of a figure; None where there is no layout."""
    values = [float(getattr(record.figures, figure)) for record in records if record.figures]
    return sum(values) / len(values) if values else None


def middle_ms(records: Iterable[Record]) -> tuple[float, float, float] | None:
    """Median, least and most processor milliseconds over seeds and repeats; None where there are none."""
    times = [time for record in records for time in record.ms]
    return (median(times), min(times), max(times)) if times else None
