"""A decode engine behind an event loop: requests come and go while it decodes. Independent of verl and ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from equipoise.errors import InvalidInput
from equipoise.rollout.decode import DecodeEngine
from equipoise.rollout.transfer import RequestState

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a request has generated; unfinished if ``state.finish_reason`` is None."""

    state: RequestState
    kv_bytes: int = 0
    """Size of its cache, if that was sent to another replica."""


@dataclass(kw_only=True, eq=False)
class _Asked:
    """A request and its caller's future."""

    state: RequestState
    name: str | None
    with_cache: Callable[[RequestState], RequestState]
    future: asyncio.Future[Answer]

    def answer(self, state: RequestState, *, kv_bytes: int = 0) -> None:
        if not self.future.done():  # a caller may have been cancelled
            self.future.set_result(Answer(state=state, kv_bytes=kv_bytes))

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class DecodeLoop:
    """Takes requests from many tasks of one event loop, and decodes them together.

    The engine lives in one thread; requests join and leave it between two steps.

    The loop is closed until everyone who closed it has reopened it: a server may be asleep and without weights at the
    same time. While it is closed, new requests wait.

    Args:
        make_engine: called in the engine's thread.
    """

    def __init__(self, make_engine: Callable[[], DecodeEngine]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self.engine = self._thread.submit(make_engine).result()
        self._waiting: list[_Asked] = []
        self._decoding: dict[str, _Asked] = {}
        self._leaving: dict[str, tuple[_Asked, RequestState]] = {}
        self._works: set[asyncio.Task[Any]] = set()
        self._task: asyncio.Task[None] | None = None
        self._between_steps = asyncio.Lock()
        self._closed_by: set[str] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._rejecting = False

    async def submit(
        self,
        state: RequestState,
        name: str | None = None,
        *,
        with_cache: Callable[[RequestState], RequestState] = lambda state: state,
    ) -> Answer:
        """Wait for a request's tokens, or raise what the engine raises.

        Args:
            state: what to decode; its id must be unique among all ever submitted.
            name: by which :meth:`abort_one` and :meth:`hand_over` find it.
            with_cache: adds the cache that was sent for the request; called in the engine's thread on admission.
        """
        if self._rejecting:
            return Answer(state=state)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        asked = _Asked(state=state, name=name, future=future, with_cache=with_cache)
        self._waiting.append(asked)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
            self._task.add_done_callback(self._report)
        return await asked.future

    async def close(self, by: str) -> None:
        """Admit no more requests to the engine; return when the current ones have finished."""
        self._closed_by.add(by)
        self._is_open.clear()
        while True:
            async with self._between_steps:
                if not self._decoding:
                    return
            await asyncio.sleep(0.001)

    def reopen(self, by: str) -> None:
        """Undo :meth:`close`."""
        self._closed_by.discard(by)
        if not self._closed_by:
            self._is_open.set()

    async def abort(self, by: str, *, reject: bool = False) -> None:
        """Close, and return what every request has generated so far.

        Args:
            by: as for :meth:`close`.
            reject: return later requests at once instead of letting them wait.
        """
        self._rejecting = reject
        self._closed_by.add(by)
        self._is_open.clear()
        await self._to_its_end(self._abort())

    async def _abort(self) -> None:
        async with self._between_steps:
            waiting, self._waiting = self._waiting, []
            for asked in waiting:
                asked.answer(asked.state)
            for state in await self._take_out(list(self._decoding)):
                self._decoding.pop(state.id).answer(state)
            for asked, state in self._leaving.values():
                asked.answer(state)

    async def abort_one(self, name: str) -> bool:
        """Return one request's tokens so far to its caller; False if it is not here."""
        return await self.hand_over(name, None)

    async def hand_over(self, name: str, send: Callable[[RequestState], Awaitable[int]] | None) -> bool:
        """Send one request's cache elsewhere, then return what it has generated; False if it is not here.

        Args:
            name: name of the request.
            send: sends a request with its cache and returns the number of bytes.
        """
        return await self._to_its_end(self._hand_over(name, send))

    async def _hand_over(self, name: str, send: Callable[[RequestState], Awaitable[int]] | None) -> bool:
        async with self._between_steps:
            asked = next((each for each in self._waiting if each.name == name), None)
            if asked is not None:
                self._waiting.remove(asked)
                asked.answer(asked.state)
                return True
            asked = next((each for each in self._decoding.values() if each.name == name), None)
            if asked is None:
                return False
            (state,) = await self._take_out([asked.state.id], with_cache=send is not None)
            del self._decoding[asked.state.id]
            bare = replace(state, kv=None, num_cached=0)
            self._leaving[state.id] = asked, bare
        kv_bytes = 0
        try:
            if send is not None and state.kv is not None:
                kv_bytes = await send(state)
        finally:  # whatever went wrong, the request continues: without its cache it is prefilled
            del self._leaving[state.id]
            asked.answer(bare, kv_bytes=kv_bytes)
        return True

    def resume(self, by: str) -> None:
        """Undo :meth:`abort`."""
        self._rejecting = False
        self.reopen(by)

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to completion even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        return await asyncio.shield(task)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Run in the engine's thread, between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _take_out(self, ids: list[str], *, with_cache: bool = False) -> list[RequestState]:
        """Remove requests from the engine, with copies of their caches."""

        def take() -> list[RequestState]:
            states = self.engine.export(ids)
            copied = [list(state.kv) if with_cache and state.kv is not None else None for state in states]
            self.engine.abort(ids)
            return [
                replace(state, kv=kv, num_cached=state.num_cached if kv else 0)
                for state, kv in zip(states, copied, strict=True)
            ]

        return await self.in_thread(take)

    async def _serve(self) -> None:
        while self._waiting or self._decoding:
            if not self._decoding:
                await self._is_open.wait()
            async with self._between_steps:
                if self._is_open.is_set():
                    await self._admit()
                await self._forget_cancelled()
                if self._decoding:
                    await self.in_thread(self.engine.step)
                    for state in self.engine.take_finished():
                        self._decoding.pop(state.id).answer(state)
            await asyncio.sleep(0)  # let others take the lock

    async def _admit(self) -> None:
        while self._waiting:
            asked = self._waiting[0]  # it stays in the queue meanwhile: `_report` must find it
            try:
                await self.in_thread(lambda asked=asked: self._import(asked))
            except InvalidInput as error:
                asked.fail(error)
            else:
                self._decoding[asked.state.id] = asked
            self._waiting.remove(asked)

    async def _forget_cancelled(self) -> None:
        gone = [name for name, asked in self._decoding.items() if asked.future.cancelled()]
        for state in await self._take_out(gone) if gone else ():
            del self._decoding[state.id]

    def _import(self, asked: _Asked) -> None:
        state = asked.with_cache(asked.state)
        if state.kv is not None:
            try:
                return self.engine.import_([state])
            except InvalidInput:  # no free blocks now; tokens can wait for some, a cache cannot
                state = replace(state, kv=None, num_cached=0)
        return self.engine.import_([state])

    def _report(self, task: asyncio.Task[None]) -> None:
        """Fail every request if the loop has failed: otherwise their callers would wait forever."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        failed = [*self._decoding.values(), *self._waiting]
        self._decoding, self._waiting = {}, []
        self._thread.submit(self._empty)
        for asked in failed:
            asked.fail(error)

    def _empty(self) -> None:
        """Empty the engine, including what finished in the step that failed."""
        self.engine.abort([state.id for state in self.engine.list_requests()])
        self.engine.take_finished()
