"""A queue of requests, answered batch by batch in a thread; knows neither verl nor ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from equipoise.trainer_hooks.verl_on_cpu.generate import Completion, Request

GATHER_S = 0.02
"""How long the first request of a batch waits for its siblings."""

Answer = Callable[[Sequence[Request], Callable[[], bool]], list[Completion]]
"""Completions of a batch; the second argument asks whether to stop early."""


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
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Lock()
        self._stop = threading.Event()
        self._closed_by: set[str] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._rejecting = False

    async def submit(self, request: Request) -> Completion:
        """Wait for a request's completion. What the work raises is raised here."""
        if self._rejecting:
            return Completion()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
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
                completions = await asyncio.to_thread(self._answer, requests, self._stop.is_set)
            for (_, future), completion in zip(self._running, completions, strict=True):
                _resolve(future, completion)
            self._running = []

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
