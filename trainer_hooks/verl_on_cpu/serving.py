"""A queue of requests, answered batch by batch in a thread; knows neither verl nor ray."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence

from equipoise.trainer_hooks.verl_on_cpu.generate import Completion, Request

GATHER_S = 0.02
"""How long the first request of a batch waits for its siblings."""


class Control:
    """What the queue has to say to a batch that runs in a thread, and what it wants to hear.

    Args:
        stop: set when all of the batch is to stop early.
        close: takes the number of a request and its completion, before the batch is over.
    """

    def __init__(self, stop: threading.Event, close: Callable[[int, Completion], None]) -> None:
        self._stop = stop
        self._aborted: set[int] = set()
        self.close = close

    def __call__(self) -> bool:
        """Whether to stop early."""
        return self._stop.is_set()

    def is_aborted(self, row: int) -> bool:
        """Whether to leave this request unfinished."""
        return row in self._aborted

    def abort(self, row: int) -> None:
        """Leave this request unfinished."""
        self._aborted.add(row)


Answer = Callable[[Sequence[Request], Control], list[Completion]]
"""Completions of a batch; a call of the second argument asks whether to stop early."""


class BatchQueue:
    """Takes requests from many tasks of one event loop.

    The queue is open unless somebody closed it, and whoever closed it has to reopen it: a server may sleep and be
    without its weights at once. While it is closed, requests wait.

    Args:
        answer: does the work, in a thread, for one batch at a time.
        max_batch: requests in a batch at most.
    """

    def __init__(self, answer: Answer, *, max_batch: int) -> None:
        self._answer = answer
        self._max_batch = max_batch
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._running: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._control: Control | None = None
        self._named: dict[str, asyncio.Future[Completion]] = {}
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Lock()
        self._stop = threading.Event()
        self._closed_by: set[str] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._rejecting = False

    async def submit(self, request: Request, name: str | None = None) -> Completion:
        """Wait for a request's completion. What the work raises is raised here.

        Args:
            request: what to complete.
            name: by which :meth:`abort_one` finds it.
        """
        if self._rejecting:
            return Completion()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if name is not None:
            self._named[name] = future
            future.add_done_callback(lambda _: self._named.pop(name, None))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
            self._task.add_done_callback(self._report)
        return await future

    async def close(self, by: str) -> None:
        """Start no batch any more; return when the running one has ended."""
        self._closed_by.add(by)
        self._is_open.clear()
        async with self._idle:
            pass

    def reopen(self, by: str) -> None:
        """Take back :meth:`close`."""
        self._closed_by.discard(by)
        if not self._closed_by:
            self._is_open.set()

    async def abort(self, by: str, *, reject: bool = False) -> None:
        """Close, and hand back what every request has got so far.

        Args:
            by: as for :meth:`close`.
            reject: hand later requests back at once instead of letting them wait.
        """
        self._rejecting = reject
        self._stop.set()
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            _resolve(future, Completion())
        await self.close(by)

    def abort_one(self, name: str) -> bool:
        """Hand back what one request has got so far; False if it is not here."""
        future = self._named.get(name)
        if future is None or future.done():
            return False
        for row, (_, running) in enumerate(self._running):
            if running is future and self._control is not None:
                self._control.abort(row)
                return True
        self._waiting = [pair for pair in self._waiting if pair[1] is not future]
        _resolve(future, Completion())
        return True

    def resume(self, by: str) -> None:
        """Take back :meth:`abort`."""
        self._rejecting = False
        self.reopen(by)

    async def _serve(self) -> None:
        while self._waiting:
            await self._is_open.wait()
            await asyncio.sleep(GATHER_S)
            async with self._idle:
                if not self._is_open.is_set():
                    continue
                self._running, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
                self._stop.clear()
                requests = [request for request, _ in self._running]
                self._control = Control(self._stop, functools.partial(self._close, asyncio.get_running_loop()))
                completions = await asyncio.to_thread(self._answer, requests, self._control)
            for (_, future), completion in zip(self._running, completions, strict=True):
                _resolve(future, completion)
            self._running = []

    def _close(self, loop: asyncio.AbstractEventLoop, row: int, completion: Completion) -> None:
        """Hand a completion over from the thread of the batch."""
        loop.call_soon_threadsafe(_resolve, self._running[row][1], completion)

    def _report(self, task: asyncio.Task[None]) -> None:
        """Let every request learn of an error: their callers would wait for ever."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        failed, self._running, self._waiting = self._running + self._waiting, [], []
        for _, future in failed:
            if not future.done():
                future.set_exception(error)


def _resolve(future: asyncio.Future[Completion], completion: Completion) -> None:
    if not future.done():  # a caller may have been cancelled
        future.set_result(completion)
