"""Transport of caches, layer by layer through a few buffers, from one engine's pool to another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from equipoise.errors import InvalidInput, must
from equipoise.rollout.transfer.channel import Channel
from equipoise.rollout.transfer.state import KVLayout, MovableEngine, RequestState
from equipoise.together import Attempt, attempt

IN_FLIGHT = 2
"""Layers in flight at once: one is packed while another is sent. No more are held besides the pools."""


def take_in(engine: MovableEngine, states: Sequence[RequestState]) -> None:
    """Give requests to an engine, with their caches if they have any. All or nothing."""
    with_cache = {state.id: state.kv for state in states if state.kv is not None and state.num_cached}
    num_layers = engine.facts().layout.num_layers if with_cache else 0
    for name, kv in with_cache.items():
        if len(kv) != num_layers:
            remedy = "move it between engines of one layout"
            raise InvalidInput(must(f"cache of request {name!r}", f"have {num_layers} layers", len(kv), remedy))
    names = [state.id for state in states]
    engine.reserve([state if state.id in with_cache else replace(state, kv=None, num_cached=0) for state in states])
    done = False
    try:
        for name, kv in with_cache.items():
            for layer in range(num_layers):
                engine.write(layer, [name], kv[layer])
        engine.commit(names)
        done = True
    finally:
        if not done:
            engine.abort(names)


class CacheStream:
    """The caches that this rank sends and receives in an exchange.

    All requests of a peer travel in one message per layer. The buffers for ``IN_FLIGHT`` layers each way are allocated
    here, once, and are all the memory needed.

    Args:
        engine: this rank's engine, with room reserved for incoming caches.
        channel: the group's channel.
        layout: layout of the caches.
        outgoing: requests with their cache, by receiver.
        incoming: requests without it, by sender; ``num_cached`` is what will arrive.
    """

    def __init__(
        self,
        engine: MovableEngine,
        channel: Channel,
        layout: KVLayout,
        outgoing: Mapping[int, Sequence[RequestState]],
        incoming: Mapping[int, Sequence[RequestState]],
    ) -> None:
        self._engine, self._channel, self._layout = engine, channel, layout
        self._outgoing = _cached(outgoing)
        self._incoming = _cached(incoming)
        self._send = [self._buffers(self._outgoing) for _ in range(IN_FLIGHT)]
        self._receive = [self._buffers(self._incoming) for _ in range(IN_FLIGHT)]
        self._done: Attempt[None] = Attempt()

    def run(self) -> Attempt[None]:
        """Send and receive every layer; returns this rank's outcome.

        If its engine fails, a rank continues with the contents of its buffers, so that the others do not wait; the vote
        on the failure comes later.

        Raises:
            RankLost: a rank did not answer.
        """
        flying: list[Any] = []
        for layer in range(self._layout.num_layers):
            if len(flying) == IN_FLIGHT:
                self._land(layer - IN_FLIGHT, flying.pop(0))
            self._try(lambda layer=layer: self._pack(layer))
            sends, receives = (list(side[layer % IN_FLIGHT].items()) for side in (self._send, self._receive))
            flying.append(self._channel.start(sends, receives))
        for back, works in zip(range(len(flying), 0, -1), flying, strict=True):
            self._land(self._layout.num_layers - back, works)
        return self._done

    def _try(self, part: Callable[[], None]) -> None:
        if self._done.failure is None:
            self._done = attempt(part)

    def _pack(self, layer: int) -> None:
        for rank, states in self._outgoing.items():
            start = 0
            for state in states:
                assert state.kv is not None
                content = state.kv[layer]
                self._send[layer % IN_FLIGHT][rank].narrow(2, start, content.shape[2]).copy_(content)
                start += content.shape[2]

    def _land(self, layer: int, works: Any) -> None:
        self._channel.finish(works)
        for rank, states in self._incoming.items():
            names, content = [state.id for state in states], self._receive[layer % IN_FLIGHT][rank]
            self._try(lambda names=names, content=content: self._engine.write(layer, names, content))

    def _buffers(self, requests: Mapping[int, Sequence[RequestState]]) -> dict[int, torch.Tensor]:
        layout = self._layout
        sizes = {rank: sum(layout.blocks(state.num_cached) for state in states) for rank, states in requests.items()}
        return {
            rank: torch.zeros(
                (2, layout.num_kv_heads, blocks, layout.block_size, layout.head_dim),
                dtype=layout.torch_dtype,
                device=self._channel.device,
            )
            for rank, blocks in sizes.items()
        }


def _cached(requests: Mapping[int, Sequence[RequestState]]) -> dict[int, list[RequestState]]:
    """Requests with a cache, by ascending rank; ranks without any are omitted."""
    found = {rank: [state for state in requests[rank] if state.num_cached] for rank in sorted(requests)}
    return {rank: states for rank, states in found.items() if states}
