"""What each stage of the search gains: the same cases planned with it and without it.

Run with ``python -m benchmarks.ablation``; ``--write`` puts the table into ``docs/search.md``. A stage stays if plans
without it cost 0.2 % more in the geometric mean of a family or 1 % more in one of its cells, need 1 % more
micro-batches, or do not exist.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import numpy as np
from rich.progress import track

from benchmarks.ablation_stages import STAGES, Stage
from benchmarks.cases import Size, cases
from benchmarks.lengths import SETS
from benchmarks.run import available
from equipoise import InfeasiblePlan, PaddedCost, StepSpec, TransformerCost, pack, plan_step
from tests.numerics.test_optimum import random_case

DOCS = Path(__file__).parents[1] / "docs" / "search.md"
BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"
MEAN, CELL, MICRO_BATCHES = 0.002, 0.01, 0.01
SMALL = ("8x2x1", "32x4x1", "64x8x1", "128x16x4")
LARGE = ("256x8x1", "512x32x1", "1024x16x4", "2048x32x4")
LARGEST = ("16384x128x4",)
FEW = ("8192x128x16",)

Found = tuple[float, int] | None
"""Cost and micro-batches of a plan, or None if there is no plan."""
Task = Callable[[], Found]


@dataclass(kw_only=True)
class Family:
    """Cases of one kind, by cell."""

    name: str
    cells: dict[str, list[Task]] = field(default_factory=dict[str, "list[Task]"])

    def add(self, cell: str, task: Task) -> None:
        """One more case of a cell."""
        self.cells.setdefault(cell, []).append(task)


@dataclass(kw_only=True)
class Result:
    """The plans of a family, by cell, and the processor seconds they took."""

    plans: dict[str, list[Found]]
    seconds: float


def _step(lengths: Any, spec: StepSpec, **options: Any) -> Task:
    def run() -> Found:
        try:
            stats = plan_step(lengths, spec, **options).stats
        except InfeasiblePlan:
            return None
        cost = stats.lockstep_cost if spec.objective == "lockstep" else stats.rank_cost
        return cost, stats.num_micro_batches

    return run


def _pack(lengths: Any, capacity: int, groups: int) -> Task:
    """The cost is the number of groups times the heaviest one: an extra group outweighs any unevenness."""
    weights = TransformerCost()(lengths)

    def run() -> Found:
        found = pack(lengths, capacity=capacity, min_groups=groups, weights=weights)
        return len(found) * max(float(weights[rows].sum()) for rows in found), len(found)

    return run


def _steps(name: str, sets: Sequence[str], sizes: Sequence[str], seeds: int, way: dict[str, Any]) -> Family:
    """Steps of the benchmark's length sets and caps, planned in one way."""
    family = Family(name=name)
    options: dict[str, Any] = {key: way[key] for key in way.keys() & {"cost"}}
    fields = {key: value for key, value in way.items() if key not in {"cost", "group_size"}}
    for case in cases(sets, [Size.parse(size) for size in sizes], range(seeds)):
        if "group_size" in way:
            options = {"group_ids": np.arange(case.size.rows) // way["group_size"]}
        cap = case.max_token_len
        if way.get("keep_groups") == "micro" and case.cap == "tight":
            cap *= way["group_size"]
        settings: dict[str, Any] = {"max_token_len_per_gpu": cap, **fields}
        spec = StepSpec(dp_size=case.size.dp_size, num_mini_batches=case.size.num_mini_batches, **settings)
        family.add(case.cell, _step(case.lengths, spec, **options))
    return family


def _uneven_groups(sets: Sequence[str], seeds: int) -> Family:
    """Groups of 1 to 6 rows that fill their ranks: hard to share out."""
    family = Family(name="groups of any size")
    for case in cases(sets, [Size.parse("64x4x1"), Size.parse("256x8x1")], range(seeds)):
        draw = np.random.default_rng(case.seed)
        ids = np.repeat(np.arange(case.size.rows), draw.integers(1, 7, case.size.rows))[: case.size.rows]
        spec = StepSpec(dp_size=case.size.dp_size, max_token_len_per_gpu=case.max_token_len, keep_groups="rank")
        family.add(case.cell, _step(case.lengths, spec, group_ids=ids))
    return family


def _exact_groups(count: int) -> Family:
    """Small groups that fill 2 to 6 ranks without a row to spare: a plan always exists."""
    family = Family(name="groups that just fit")
    for seed in range(count):
        draw = np.random.default_rng([9, seed])
        dp, rows = int(draw.integers(2, 7)), int(draw.integers(3, 13))
        sizes: list[int] = []
        for _ in range(dp):
            cuts = np.flatnonzero(np.append(draw.random(rows - 1) < 0.5, True)) + 1
            sizes += np.diff(cuts, prepend=0).tolist()
        ids = np.repeat(np.arange(len(sizes)), draw.permutation(sizes))
        spec = StepSpec(dp_size=dp, keep_groups="rank")
        family.add(f"{dp} ranks", _step(draw.integers(1, 9000, ids.size), spec, group_ids=ids))
    return family


def _tight(count: int, algorithm: str) -> Family:
    """A few rows under a cap near the longest, for which a plan is not always found."""
    family = Family(name="barely feasible" if algorithm == "refined" else f"{algorithm}, barely feasible")
    for seed in range(count):
        draw = np.random.default_rng([7, seed])
        dp = int(draw.integers(1, 4))
        lengths = draw.integers(1, 31, dp * int(draw.integers(3, 8)))
        cap = max(int(lengths.max()), int(lengths.max() * draw.choice([1.0, 1.1, 1.5])))
        settings: dict[str, Any] = {"micro_batch_multiple": int(draw.integers(1, 4)), "algorithm": algorithm}
        spec = StepSpec(dp_size=dp, max_token_len_per_gpu=cap, **settings)
        family.add(f"{dp} ranks, multiple {spec.micro_batch_multiple}", _step(lengths, spec))
    return family


def _solved(count: int) -> Family:
    """Small cases that the tests compare with HiGHS: 8 to 14 rows, 2 or 3 ranks, 1 or 2 micro-batches."""
    family = Family(name="compared with HiGHS")
    for capped in (False, True):
        for number in range(count):
            case = random_case(number, capped=capped)
            spec = StepSpec(dp_size=case.ranks, min_micro_batches=case.columns, max_token_len_per_gpu=case.cap)
            family.add(f"{case.ranks}x{case.columns}{' capped' if capped else ''}", _step(case.tokens, spec))
    return family


def _packs(sets: Sequence[str], seeds: int) -> list[Family]:
    """Rows of the length sets, and a few rows that barely fit: the cases that the tests compare with HiGHS."""
    family, full = Family(name="pack"), Family(name="pack, few rows")
    for case in cases(sets, [Size(24, 1, 1), Size(64, 1, 1), Size(512, 1, 1)], range(seeds)):
        for least in (1, 8):
            family.add(f"{case.cell}/{least}", _pack(np.asarray(case.lengths), case.max_token_len, least))
    for seed in range(60 * seeds):
        draw = np.random.default_rng([5, seed])
        rows = int(draw.integers(8, 17))
        full.add(f"{rows} rows", _pack(draw.integers(20, 100, rows), 200, 1))
    return [family, full]


def families(sets: Sequence[str], seeds: int) -> list[Family]:
    """All kinds of cases."""
    grouped = ("64x4x1", "512x8x2")
    fixed = {"micro_batch_size_per_gpu": 4, "max_token_len_per_gpu": None}
    pairs = {"keep_groups": "micro", "group_size": 2}
    return [
        _steps("small steps", sets, SMALL, 2 * seeds, {}),
        _steps("large steps", sets, LARGE, seeds, {}),
        _steps("largest steps", sets, LARGEST, seeds, {}),
        _steps("few rows per cell", sets, FEW, seeds, {}),
        _steps("objective rank", sets, ("32x4x1", "128x16x4", "512x8x2"), seeds, {"objective": "rank"}),
        _steps("fixed rows", sets, ("32x4x1", "512x8x2"), seeds, fixed),
        _solved(60 * seeds),
        _tight(150 * seeds, "refined"),
        _tight(150 * seeds, "lpt"),
        _steps("groups on a rank", sets, grouped, seeds, {"keep_groups": "rank", "group_size": 8}),
        _steps("groups in a micro-batch", sets, grouped, seeds, {"keep_groups": "micro", "group_size": 4}),
        _steps("groups in fixed micro-batches", sets, ("32x4x1", "512x8x2"), seeds, {**pairs, **fixed}),
        _uneven_groups(sets, 2 * seeds),
        _exact_groups(200 * seeds),
        _steps("padded", sets, ("32x4x1", "64x8x1", "512x8x2"), seeds, {"cost": PaddedCost()}),
        *_packs(sets, 2 * seeds),
    ]


def measure(family: Family) -> Result:
    """Plan every case once."""
    start = time.thread_time()
    plans = {cell: [task() for task in tasks] for cell, tasks in family.cells.items()}
    return Result(plans=plans, seconds=time.thread_time() - start)


@contextmanager
def without(stage: Stage) -> Generator[None]:
    """Run the block without the stage."""
    with ExitStack() as stack:
        for target, replacement in stage.patches:
            stack.enter_context(mock.patch(f"equipoise.planning.{target}", replacement))
        yield


@dataclass(kw_only=True)
class Gain:
    """What a stage gains in one family.

    Attributes:
        overall: how much more plans cost without it, in the geometric mean over cells.
        cell: the same in the cell where it gains most.
        where: that cell.
        micro_batches: how many more micro-batches plans need without it, as a share.
        plans: cases that have a plan only with it.
        pace: seconds with it ÷ seconds without it.
    """

    overall: float
    cell: float
    where: str
    micro_batches: float
    plans: int
    pace: float

    @property
    def pays(self) -> bool:
        """Whether it is worth its lines."""
        return self.overall >= MEAN or self.cell >= CELL or self.micro_batches >= MICRO_BATCHES or self.plans > 0


def compare(full: Result, less: Result) -> Gain:
    """Costs without a stage ÷ costs with it; cells are means of their cases."""
    ratios: dict[str, float] = {}
    plans = with_it = without_it = 0
    for cell, found in full.plans.items():
        pairs = list(zip(found, less.plans[cell], strict=True))
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        plans += sum(a is not None for a, _ in pairs) - sum(b is not None for _, b in pairs)
        with_it += sum(a[1] for a, _ in both)
        without_it += sum(b[1] for _, b in both)
        if both:
            ratios[cell] = mean(b[0] / a[0] if a[0] else 1.0 for a, b in both)
    where = max(ratios, key=lambda cell: ratios[cell])
    return Gain(
        overall=math.exp(mean(map(math.log, ratios.values()))) - 1,
        cell=ratios[where] - 1,
        where=where,
        micro_batches=without_it / with_it - 1,
        plans=plans,
        pace=full.seconds / less.seconds,
    )


def table(gains: dict[tuple[str, str], Gain]) -> list[str]:
    """Lines of a Markdown table, one row for each stage and family."""
    lines = [
        "| stage | cases | gain, mean | gain, best cell | that cell | micro-batches | plans gained | time | pays |",
        "| :-- | :-- | --: | --: | :-- | --: | --: | --: | :-- |",
    ]
    for (stage, family), gain in gains.items():
        cost = f"{100 * gain.overall:.3f} % | {100 * gain.cell:.2f} % | {gain.where}"
        rest = f"{100 * gain.micro_batches:+.2f} % | {gain.plans} | {gain.pace:.2f} | {'yes' if gain.pays else 'no'}"
        lines.append(f"| {stage} | {family} | {cost} | {rest} |")
    return lines


def write(lines: list[str], path: Path = DOCS) -> None:
    """Write the table between its markers."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{path} must hold {BEGIN} and {END}")
    path.write_text("\n".join([before + BEGIN, *lines, END]) + after)


def main(argv: Sequence[str] | None = None) -> int:
    """Plan without one stage of the search at a time, and compare the plans."""
    parser = argparse.ArgumentParser(prog="ablation", description=main.__doc__)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS), help="length sets")
    parser.add_argument("--seeds", type=int, default=1, help="draws of each case")
    parser.add_argument("--stages", nargs="+", help="only stages whose names contain one of these words")
    parser.add_argument("--families", nargs="+", help="only families whose names contain one of these words")
    parser.add_argument("--write", action="store_true", help=f"write the table into {DOCS.name}")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    sets = available(options.sets, lambda line: print(line, file=sys.stderr))
    kinds = [
        family
        for family in families(sets, options.seeds)
        if not options.families or any(word in family.name for word in options.families)
    ]
    stages = [stage for stage in STAGES if not options.stages or any(word in stage.name for word in options.stages)]
    work = [
        (family, stage)
        for family in kinds
        for stage in (None, *stages)
        if stage is None or stage.takes_part_in(family.name)
    ]
    full: dict[str, Result] = {}
    gains: dict[tuple[str, str], Gain] = {}
    for family, stage in track(work, description="plans"):
        if stage is None:
            measure(family)  # warm
            full[family.name] = measure(family)
            continue
        with without(stage):
            gains[stage.name, family.name] = compare(full[family.name], measure(family))
    order = {stage.name: at for at, stage in enumerate(stages)}
    lines = table(dict(sorted(gains.items(), key=lambda item: order[item[0][0]])))
    print("\n".join(lines))
    if options.write:
        write(lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
