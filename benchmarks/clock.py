"""What planning costs one step: the driver's part, and the part that ranks do at the same time."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Generator
from types import FrameType


class OverBudget(TimeoutError):
    """A planner used more processor time than it was given."""


class Clock:
    """Processor seconds of a plan, by who spends them.

    Processor time of the calling thread rather than wall time: it says the same on a machine that does other things as
    well. Ranks plan side by side, so a step waits for the driver and one rank; no collective is counted.
    """

    def __init__(self) -> None:
        self.driver_s = 0.0
        self.rank_s = 0.0

    @property
    def step_s(self) -> float:
        """Seconds that one step waits: the driver and one rank."""
        return self.driver_s + self.rank_s

    @contextlib.contextmanager
    def driver(self) -> Generator[None]:
        """Time what one process does for all ranks."""
        start = time.thread_time()
        yield
        self.driver_s += time.thread_time() - start

    @contextlib.contextmanager
    def ranks(self, num_ranks: int) -> Generator[None]:
        """Time what ``num_ranks`` ranks do for themselves, here one after the other; the mean counts."""
        start = time.thread_time()
        yield
        self.rank_s += (time.thread_time() - start) / num_ranks


@contextlib.contextmanager
def budget(seconds: float) -> Generator[None]:
    """Raise :class:`OverBudget` in the block once it has used ``seconds`` of processor time (POSIX, main thread)."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise OverBudget(f"over {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
