"""The report of a run in Markdown: a summary, where Equipoise is behind, and every cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median

from benchmarks.cases import Size
from benchmarks.planners import OURS, is_ours
from benchmarks.run import Record, Run, mean, middle_ms
from benchmarks.speed import Timing

BEHIND = 1e-4

INTRO = """\
Cost of a row: 24576·L + L². **lockstep** and **rank** are a plan's cost over the bound of the batch's own mini-batches,
Σ over mini-batches of max(mean cost of a rank, cost of the longest row), the same bound for all planners of a case; 1
is ideal. A planner that makes mini-batches of its own (verl, AReaL, MindSpeed-RL, stratified) can be below 1 where it
puts the longest rows together: cheaper, but the optimizer then sees rows of like length together. **micro-batches**: of
one rank in the whole step, and how many more than the least possible. **over cap**: rows in micro-batches above the
cap. **ms**: processor milliseconds of the driver and one rank, collectives not counted: median, and least to most. All
but ms are means over seeds. Peers other than verl and TransferQueue are stated anew, so their ms are those of the
restatement.
"""


TARGETS = """\
## What Equipoise is held to

Cases with at least 8 rows per rank and mini-batch. "At the least" is the share of cases with the fewest micro-batches
that the tokens and the rows above half of the cap allow, which may be fewer than any plan can have.
"""


def report(run: Run, timings: Sequence[Timing], notes: Iterable[str]) -> str:
    """Markdown of the whole run."""
    parts = [
        "# Plan quality",
        INTRO,
        *(f"- {note}" for note in notes),
        "",
        "## Summary: lockstep, median over sizes and caps (worst)",
        table(*summary(run)),
        TARGETS,
        table(*targets(run)),
        *(
            "\n".join(
                [f"## Where Equipoise is behind {title}", "", *(f"- {line}" for line in lines or ["Nowhere."]), ""]
            )
            for title, lines in behind(run).items()
        ),
        "## Skipped",
        _list(skipped(run), "Nothing."),
        "## Speed: processor milliseconds by rows x ranks x steps, log-normal lengths, cap 32768 where not said",
        table(*speed(timings)) if timings else "Not measured.\n",
        "## Every cell: length set / rows x ranks x steps / cap",
        *(f"### {cell}\n\n{table(*cell_rows(run, cell))}" for cell in run.cells()),
    ]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | :-- | --: |
    | 1 | 2 |
    <BLANKLINE>
    """
    lines = [head, [":--", *("--:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _list(lines: Sequence[str], if_none: str) -> str:
    return "\n".join(f"- {line}" for line in lines or [if_none]) + "\n"


def summary(run: Run) -> tuple[list[str], list[list[str]]]:
    """Lockstep cost of each planner by length set, micro-batches beyond the least, rows over the cap, time."""
    cells = run.cells()
    sets = list(dict.fromkeys(cell.split("/")[0] for cell in cells))
    rows: list[list[str]] = []
    for planner in run.planners():
        row = [planner]
        for name in sets:
            of_set = [mean(run.of(cell, planner), "lockstep") for cell in cells if cell.startswith(f"{name}/")]
            values = [value for value in of_set if value is not None]
            row.append(f"{median(values):.3f} ({max(values):.3f})" if values else "skipped")
        done = [record.figures for record in run.records if record.planner == planner and record.figures]
        row.append(f"{sum(f.num_micro_batches - f.least for f in done) / len(done):+.2f}" if done else "skipped")
        row.append(str(sum(f.rows_over for f in done)) if done else "skipped")
        times = middle_ms(record for record in run.records if record.planner == planner)
        row.append(f"{times[0]:.1f}" if times else "skipped")
        rows.append(row)
    return ["planner", *sets, "micro-batches beyond least", "rows over cap", "ms"], rows


def targets(run: Run) -> tuple[list[str], list[list[str]]]:
    """What the plans of Equipoise's default reach under each cap, and what they are held to."""
    rows: list[list[str]] = []
    for cap, mean_goal, worst_goal in (("loose", 1.01, 1.04), ("tight", 1.08, 1.20)):
        done = [
            record.figures
            for record in run.records
            if record.planner == OURS and record.figures and _held(record.cell, cap)
        ]
        if not done:
            continue
        least = sum(f.num_micro_batches == f.least for f in done) / len(done)
        rows.append(
            [
                cap,
                str(len(done)),
                f"{geometric_mean(f.lockstep for f in done):.4f} ({mean_goal:.2f})",
                f"{max(f.lockstep for f in done):.4f} ({worst_goal:.2f})",
                f"{100 * least:.1f} % (95 %)",
                f"{sum(f.rows_over for f in done)} (0)",
            ]
        )
    return [
        "cap",
        "cases",
        "geometric mean (goal)",
        "worst (goal)",
        "at the least (goal)",
        "rows over cap (goal)",
    ], rows


def _held(cell: str, cap: str) -> bool:
    _, text, of_cell = cell.split("/")
    size = Size.parse(text)
    return of_cell == cap and size.rows >= 8 * size.dp_size * size.num_mini_batches


def behind(run: Run) -> dict[str, list[str]]:
    """Each figure and cell in which peers that keep the cap in all seeds do better than Equipoise, with the best one.

    Peers on the same terms keep the batch's mini-batches and give each rank as many rows; the others are apart. For
    **rank** Equipoise plans with that objective, where it has it.
    """
    ours = {"lockstep": OURS, "num_micro_batches": OURS, "rank": OURS}
    if f"{OURS}, rank" in run.planners():
        ours["rank"] = f"{OURS}, rank"
    same: list[str] = []
    other: list[str] = []
    for (figure, name), cell in ((item, cell) for item in ours.items() for cell in run.cells()):
        mine = run.of(cell, name)
        own = mean(mine, figure) or 0.0
        better: dict[bool, list[tuple[float, str]]] = {False: [], True: []}
        for peer in run.planners():
            theirs = run.of(cell, peer)
            if not is_ours(peer) and _comparable(mine, theirs):
                value, terms = mean(theirs, figure) or 0.0, _terms(theirs)
                if own > value * (1 + BEHIND):
                    better[bool(terms)].append((value, f"{peer}{terms}"))
        for lines, found in ((same, better[False]), (other, better[True])):
            if found:
                value, peer = min(found)
                others = f"; {len(found) - 1} more below {own:.4f}" if len(found) > 1 else ""
                lines.append(f"{figure}, {cell}: {own:.4f}, {peer} {value:.4f}{others}")
    return {
        "a peer on the same terms": same,
        "a peer that makes mini-batches of its own, or gives ranks different numbers of rows": other,
    }


def _terms(records: Sequence[Record]) -> str:
    """What a peer does otherwise; empty on the same terms."""
    spread = max(record.figures.row_spread for record in records if record.figures)
    own = not all(record.figures.keeps for record in records if record.figures)
    notes = [f"ranks differ by up to {spread} rows"] * (spread > 0)
    notes += [f"own mini-batches, at {mean(records, 'own_bound'):.3f} of the bound"] * own
    return f" ({'; '.join(notes)})" if notes else ""


def _comparable(mine: Sequence[Record], theirs: Sequence[Record]) -> bool:
    return (
        all(record.figures for record in (*mine, *theirs))
        and {record.seed for record in mine} == {record.seed for record in theirs}
        and all(record.figures.rows_over == 0 for record in theirs if record.figures)
    )


def skipped(run: Run) -> list[str]:
    """What was not measured, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in run.records:
        if record.skipped:
            reasons.setdefault((record.planner, record.skipped), []).append(f"{record.cell}, seed {record.seed}")
    return [
        f"{planner}: {reason} ({len(where)} cases, the first {where[0]})"
        for (planner, reason), where in reasons.items()
    ]


def cell_rows(run: Run, cell: str) -> tuple[list[str], list[list[str]]]:
    """All figures of one cell, a row for each planner."""
    rows: list[list[str]] = []
    for planner in run.planners():
        records = run.of(cell, planner)
        if not records:
            continue
        lockstep, rank = mean(records, "lockstep"), mean(records, "rank")
        count, least = mean(records, "num_micro_batches"), mean(records, "least")
        over, times = mean(records, "rows_over"), middle_ms(records)
        if None in (lockstep, rank, count, least, over) or times is None:
            rows.append([planner, "skipped", "", "", "", records[0].skipped])
            continue
        rows.append(
            [
                planner,
                f"{lockstep:.4f}",
                f"{rank:.4f}",
                f"{count:.1f} ({(count or 0) - (least or 0):+.1f})",
                f"{over:.1f}",
                f"{times[0]:.1f} ({times[1]:.1f} to {times[2]:.1f})",
            ]
        )
    return ["planner", "lockstep", "rank", "micro-batches", "over cap", "ms"], rows


def speed(timings: Sequence[Timing]) -> tuple[list[str], list[list[str]]]:
    """Time by size, a row for each planner or part of verl."""
    sizes = list(dict.fromkeys(timing.size for timing in timings))
    rows: list[list[str]] = []
    for planner in dict.fromkeys(timing.planner for timing in timings):
        of_size = {timing.size: timing for timing in timings if timing.planner == planner}
        rows.append([planner, *(_ms(of_size[size]) for size in sizes)])
    return ["planner", *sizes], rows


def _ms(timing: Timing) -> str:
    if timing.ms is None:
        return f"skipped: {timing.skipped}"
    return f"{timing.ms:.1f} ({timing.least_ms:.1f} to {timing.most_ms:.1f})"
