"""In a worker: how long each micro-batch's forward and backward took, read once after the last one.

verl's engines run ``for micro_batch in micro_batches: forward; backward``. So the time between two items that the loop
takes is that of one micro-batch, with no change to the loop. On a device, an event is recorded in its stream at each
item; the host waits only at the end of the mini-batch, where verl reads the gradient norm anyway.
"""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

from equipoise.trainer_hooks.on_verl._patches import CLOCK_KEY, TIMES_KEY


class TimedMicroBatches(list[Any]):
    """Micro-batches that record the time whenever one is taken, and at the end.

    Args:
        micro_batches: in execution order.
        step: index of their mini-batch.
        event: creates a device timing event; None for the host's clock.
    """

    def __init__(self, micro_batches: Iterable[Any], *, step: int, event: Any = None) -> None:
        super().__init__(micro_batches)
        self.step = step
        self._event = event
        self._marks: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches, timed."""
        for micro_batch in super().__iter__():
            self._mark()
            yield micro_batch
        self._mark()

    def _mark(self) -> None:
        if self._event is None:
            self._marks.append(time.perf_counter())
        else:
            mark = self._event(enable_timing=True)
            mark.record()
            self._marks.append(mark)

    def seconds(self) -> list[float] | None:
        """Seconds of each micro-batch; None unless they were iterated exactly once, to the end."""
        marks = self._marks
        if len(marks) != len(self) + 1:
            return None
        pairs = itertools.pairwise(marks)
        if self._event is None:
            return [end - start for start, end in pairs]
        marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def timed(data: Any, micro_batches: list[Any], step: int) -> list[Any]:
    """``micro_batches`` of mini-batch ``step``, timed; ``data`` remembers them for :func:`add_times`."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_name, get_torch_device

    event = None if get_device_name() == "cpu" else get_torch_device().Event
    found = TimedMicroBatches(micro_batches, step=step, event=event)
    tu.assign_non_tensor(data, **{CLOCK_KEY: _Holder(found)})
    return found


def add_times(output: dict[str, Any], data: Any) -> None:
    """Add the index of the mini-batch and its seconds to the metrics of an engine's output."""
    from verl.utils import tensordict_utils as tu

    found: TimedMicroBatches = tu.get_non_tensor_data(data, CLOCK_KEY, None).micro_batches
    seconds = found.seconds()
    if seconds is not None:
        output["metrics"][TIMES_KEY] = [float(found.step), *seconds]


class _Holder:
    """Keeps TensorDict from treating a list as a column."""

    def __init__(self, micro_batches: TimedMicroBatches) -> None:
        self.micro_batches = micro_batches
