"""What was measured as Markdown: one row for each engine and number of processes, and where equipoise is behind."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.engine_measure import PEER, Pair
from benchmarks.engine_ranks import JOBS
from benchmarks.tables import table

UPDATE = JOBS[-1]
HEAD = ["ranks", "engine", *(f"{job}, tokens/s" for job in (UPDATE, *JOBS[:-1])), "peak, update", "peak, pass"]


def report(pairs: Sequence[Pair]) -> str:
    """The table; ratios to verl's engine are medians over pairs of neighbouring runs."""
    rows: list[list[str]] = []
    for world in dict.fromkeys(pair.world for pair in pairs):
        of_world = [pair for pair in pairs if pair.world == world]
        rows.append([str(world), PEER, *_peer_cells(of_world)])
        rows += [[str(world), pair.name, *_own_cells(pair)] for pair in of_world]
    return table(HEAD, rows)


def _peer_cells(pairs: Sequence[Pair]) -> list[str]:
    speeds = [
        pairs[0].tokens / median(s for pair in pairs for s in pair.seconds[job][PEER]) for job in (UPDATE, *JOBS[:-1])
    ]
    peaks = [median(pair.peak_mib[job][PEER] for pair in pairs) for job in (UPDATE, JOBS[1])]
    return [*(f"{speed:,.0f}" for speed in speeds), *(f"{peak:,.0f} MiB" for peak in peaks)]


def _own_cells(pair: Pair) -> list[str]:
    cells: list[str] = []
    for job in (UPDATE, *JOBS[:-1]):
        ratio, least, most = pair.speed(job)
        speed = pair.tokens / median(pair.seconds[job][pair.name])
        cells.append(f"{speed:,.0f} (×{ratio:.2f}, {least:.2f}–{most:.2f}; ×{pair.processor_speed(job):.2f})")
    return cells + [f"{pair.peak_mib[job][pair.name]:,.0f} MiB (×{pair.memory(job):.2f})" for job in (UPDATE, JOBS[1])]


def behind(pairs: Sequence[Pair]) -> list[str]:
    """Where an engine of equipoise is slower than verl's or needs more memory."""
    lines: list[str] = []
    for pair in pairs:
        where = f"{pair.name} on {pair.world} rank{'s' * (pair.world > 1)}"
        for job in JOBS:
            ratio, least, most = pair.speed(job)
            if ratio < 1:
                spent = f"by processor time {pair.processor_speed(job):.2f}"
                lines.append(f"{where}, {job}: {ratio:.2f} times verl's speed ({least:.2f} to {most:.2f}; {spent})")
            if pair.memory(job) > 1:
                mine, theirs = pair.peak_mib[job][pair.name], pair.peak_mib[job][PEER]
                lines.append(f"{where}, {job}: {mine:,.0f} MiB where verl needs {theirs:,.0f}")
    return lines


def equality(pairs: Sequence[Pair]) -> str:
    """How far apart the results were, in words."""
    most = {figure: max(pair.apart[figure] for pair in pairs) for figure in pairs[0].apart}
    return (
        f"Same rows, same results: log-probs at most {most['log-probs']:.1e} apart, loss {most['loss']:.1e}, "
        f"gradient norm {most['grad_norm']:.1e} (relative), over all updates."
    )


def cut(pairs: Sequence[Pair]) -> str:
    """Micro-batches of one rank, by engine."""
    found = {f"{side} on {pair.world}": count for pair in pairs for side, count in pair.micro_batches.items()}
    return "Micro-batches of rank 0 in an update: " + ", ".join(f"{side} {count}" for side, count in found.items())
