"""Engines beside verl's in one run, in turn: A B B A."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.engine_case import EngineCase
from benchmarks.engine_ranks import JOBS, EngineProcesses, Reply

PEER = "verl fsdp2"
LOSS_TOLERANCE = 1e-4
"""Relative, for the loss against the mean advantage's size of 1, and for the gradient norm."""
LOG_PROB_TOLERANCE = 1e-3


class UnequalWork(RuntimeError):
    """The engines did not compute the same from the same rows."""


Times = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One engine of equipoise and verl's, side by side.

    Attributes:
        name: the engine of equipoise.
        world: processes of each engine.
        tokens: of one job, over all ranks.
        seconds: by job and engine, one for each repeat, the i-th of both next to each other in time.
        processor_s: likewise, of all ranks together.
        peak_mib: by job and engine, of the rank that needs most.
        micro_batches: of one rank in one update, by engine.
        apart: largest difference of "log-probs", "loss" and "grad_norm".
    """

    name: str
    world: int
    tokens: int
    seconds: Times = field(default_factory=dict[str, dict[str, list[float]]])
    processor_s: Times = field(default_factory=dict[str, dict[str, list[float]]])
    peak_mib: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    micro_batches: dict[str, int] = field(default_factory=dict[str, int])
    apart: dict[str, float] = field(default_factory=dict[str, float])

    def speed(self, job: str) -> tuple[float, float, float]:
        """Tokens per second over verl's: median, least and most of the repeats."""
        return self._over(self.seconds[job])

    def processor_speed(self, job: str) -> float:
        """Tokens per processor second over verl's: median of the repeats."""
        return self._over(self.processor_s[job])[0]

    def _over(self, times: dict[str, list[float]]) -> tuple[float, float, float]:
        ratios = [theirs / mine for mine, theirs in zip(times[self.name], times[PEER], strict=True)]
        return median(ratios), min(ratios), max(ratios)

    def memory(self, job: str) -> float:
        """Peak memory over verl's."""
        return self.peak_mib[job][self.name] / self.peak_mib[job][PEER]


def measure(
    case: EngineCase,
    name: str,
    *,
    world: int,
    threads: int,
    repeats: int,
    log: Path,
    tick: Callable[[str], None],
) -> Pair:
    """Run both engines on ``world`` processes each; while one works, the other waits.

    Args:
        case: what is run.
        name: engine of equipoise.
        world: processes of each engine.
        threads: of each process.
        repeats: timed runs of each job and engine.
        log: file that gets what the processes print.
        tick: called before each run with what comes: :func:`runs` times.

    Raises:
        UnequalWork: log-probs, losses or gradient norms are not those of verl.
        RankFailed: a process raised, ended or hangs.
    """
    pair = Pair(name=name, world=world, tokens=case.num_tokens)
    with ExitStack() as stack:
        engines: dict[str, EngineProcesses] = {}
        for side in (PEER, name):
            tick(f"{side} on {world}: start")
            made = EngineProcesses(side, case, world=world, threads=threads, log=log)
            engines[side] = stack.enter_context(closing(made))
            made.wait()
        for job in JOBS:
            replies: dict[str, list[list[Reply]]] = {PEER: [], name: []}
            for i, side in enumerate([PEER, name, *turns(PEER, name, repeats)]):
                tick(f"{side} on {world}: {job}")
                replies[side].append(engines[side].run(job, warm_up=i < 2))
            _note(pair, job, replies)
    check(pair)
    return pair


def runs(repeats: int) -> int:
    """How often :func:`measure` calls ``tick``."""
    return 2 + len(JOBS) * 2 * (1 + repeats)


def turns(a: str, b: str, repeats: int) -> list[str]:
    """A B B A A B B A …, each ``repeats`` times.

    >>> "".join(turns("a", "b", 3))
    'abbaab'
    """
    return [side for i in range(repeats) for side in ((a, b) if i % 2 == 0 else (b, a))]


def _note(pair: Pair, job: str, replies: dict[str, list[list[Reply]]]) -> None:
    pair.seconds[job] = {side: [max(r.seconds for r in ranks) for ranks in done[1:]] for side, done in replies.items()}
    pair.processor_s[job] = {
        side: [sum(r.processor_s for r in ranks) for ranks in done[1:]] for side, done in replies.items()
    }
    pair.peak_mib[job] = {side: max(r.peak_mib for ranks in done for r in ranks) for side, done in replies.items()}
    peer, ours = replies[PEER], replies[pair.name]
    if job == "update":
        for figure in ("loss", "grad_norm"):
            both = [(a[0].figures[figure], b[0].figures[figure]) for a, b in zip(peer, ours, strict=True)]
            pair.apart[figure] = max(abs(a - b) / (max(1.0, abs(a)) if figure == "loss" else abs(a)) for a, b in both)
        for side, done in replies.items():
            pair.micro_batches[side] = int(done[0][0].figures["micro_batches"])
    elif job == JOBS[0]:
        first = zip(_tokens(peer[0]), _tokens(ours[0]), strict=True)
        pair.apart["log-probs"] = max(abs(a - b) for a, b in first)


def _tokens(ranks: Sequence[Reply]) -> list[float]:
    return [value for reply in ranks for row in reply.log_probs for value in row]


def check(pair: Pair) -> None:
    """Raise :class:`UnequalWork` where the engines' results are further apart than float32 explains."""
    for figure, apart in pair.apart.items():
        limit = LOG_PROB_TOLERANCE if figure == "log-probs" else LOSS_TOLERANCE
        if not apart <= limit:
            raise UnequalWork(f"{figure} of {pair.name} must be verl's within {limit:g}, are {apart:.3g} apart")
