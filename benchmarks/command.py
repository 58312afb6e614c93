"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import baseline, plots, speed, tables
from benchmarks.cases import CAPS, QUICK_SIZES, SIZES, Size, cases
from benchmarks.lengths import SETS
from benchmarks.planners import Planner, is_ours, planners
from benchmarks.run import Run, available, run_cases
from benchmarks.speed import Timing, timings

SHOWN = 12
OUTPUTS = Path(__file__).parents[1] / "outputs" / "bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where plans got worse than the committed baseline, else 0."""
    options = _parse(argv)
    console = Console()
    console.width = max(console.width, 120)
    sets = available(options.sets, lambda line: console.print(line, style="yellow", highlight=False))
    if not sets:
        console.print("no length set is left to measure", style="red")
        return 2
    found = planners()
    _warm_up(found)
    run, times = _measure(options, sets, found, console)
    _write(run, times, options, console)
    _show(run, times, console)
    if options.update_baseline:
        baseline.write(run)
        console.print(f"wrote {baseline.BASELINE}", highlight=False)
        return 0
    return _compare(run, console)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="plan_quality", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="three small sizes, one seed, fewer timings: a minute")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS), help="length sets")
    parser.add_argument("--sizes", nargs="+", type=Size.parse, help="rows x ranks x steps, for example 2048x32x4")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds of the draws (0 to 4)")
    parser.add_argument("--budget", type=float, help="processor seconds of a planner for one case (10; quick: 3)")
    parser.add_argument("--no-speed", action="store_true", help="leave out the timings of large steps")
    parser.add_argument("--out", type=Path, default=OUTPUTS, help="folder of the results")
    parser.add_argument("--update-baseline", action="store_true", help="write the baseline, compare nothing")
    options = parser.parse_args(argv)
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    options.seeds = options.seeds or ([0] if options.quick else [0, 1, 2, 3, 4])
    options.budget = options.budget or (3.0 if options.quick else 10.0)
    return options


def _warm_up(found: dict[str, Planner]) -> None:
    """Import what planners import late, so that no first case pays for it."""
    case = next(iter(cases(["lognormal"], [Size(16, 2, 1)], [0])))
    run_cases([case], found, repeats=1, budget_s=600, tick=lambda case, name: None)


def _measure(
    options: argparse.Namespace, sets: list[str], found: dict[str, Planner], console: Console
) -> tuple[Run, list[Timing]]:
    total = len(sets) * len(options.sizes) * len(options.seeds) * len(CAPS) * len(found)
    with _progress(console, "plans", total) as step:
        run = run_cases(
            cases(sets, options.sizes, options.seeds),
            found,
            repeats=1 if options.quick else 3,
            budget_s=options.budget,
            tick=lambda case, name: step(f"{case.cell}, seed {case.seed}: {name}"),
        )
    if options.no_speed:
        return run, []
    sizes = speed.QUICK_GROWTH if options.quick else speed.GROWTH
    parts = sum(map(is_ours, found)) + 4
    with _progress(console, "speed", len(sizes) * parts) as step:
        return run, timings(sizes, found, repeats=1 if options.quick else 5, budget_s=6 * options.budget, tick=step)


@contextmanager
def _progress(console: Console, label: str, total: int) -> Generator[Callable[[str], None]]:
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=total, completed=-1)

        def step(text: str) -> None:
            progress.update(task, advance=1, description=text)

        yield step
        progress.update(task, completed=total, description="")


def _write(run: Run, times: list[Timing], options: argparse.Namespace, console: Console) -> None:
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    machine = baseline.machine()
    content = {
        "machine": machine,
        "budget_s": options.budget,
        "records": [record.as_json() for record in run.records],
        "speed": [asdict(timing) for timing in times],
    }
    (out / "plan_quality.json").write_text(json.dumps(content, indent=1))
    notes = [f"{key}: {value}" for key, value in machine.items()]
    notes.append(f"seeds: {', '.join(map(str, options.seeds))}; budget of a planner for one case: {options.budget:g} s")
    (out / "plan_quality.md").write_text(tables.report(run, times, notes))
    plots.quality(run, out / "quality.png")
    if times:
        plots.planning_time(times, out / "planning_time.png")
    console.print(f"wrote plan_quality.json, plan_quality.md and plots to {out}", highlight=False)


def _show(run: Run, times: list[Timing], console: Console) -> None:
    lines = ["## Lockstep cost over the bound, median over sizes and caps (worst)", tables.table(*tables.summary(run))]
    lines += [tables.TARGETS, tables.table(*tables.targets(run))]
    if times:
        lines += ["## Processor milliseconds by rows x ranks x steps", tables.table(*tables.speed(times))]
    for title, behind in tables.behind(run).items():
        lines.append(f"## Where Equipoise is behind {title}")
        lines += [f"- {line}" for line in behind[:SHOWN]] or ["Nowhere."]
        lines += [f"- and {len(behind) - SHOWN} more in plan_quality.md"] * (len(behind) > SHOWN)
    lines.append("## Skipped")
    lines += [f"- {line}" for line in tables.skipped(run)] or ["Nothing."]
    console.print(Markdown("\n".join(lines)))


def _compare(run: Run, console: Console) -> int:
    before = baseline.read()
    if before is None:
        console.print(f"no baseline yet; --update-baseline writes {baseline.BASELINE.name}", style="yellow")
        return 0
    quality, slower = baseline.worse(run, before)
    made = f"{before['machine']['date']} on {before['machine']['processor']}"
    for label, lines in (("worse", quality), ("slower", slower)):
        for line in lines:
            console.print(f"{label}: {line}", style="red", highlight=False)
    if not quality and not slower:
        console.print(f"nothing got worse than the baseline of {made}", style="green", highlight=False)
    return int(bool(quality))


Step = Callable[[str], None]
