"""State of each conversation, the turns under one request id."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from cachetools import LRUCache

from equipoise.trainer_hooks.on_verl.router.ledger import Held
from equipoise.trainer_hooks.on_verl.router.replay import Stay


@dataclass(kw_only=True)
class Conversation:
    """The turns under one request id."""

    prompt: Hashable
    home: str | None = None
    """Replica of the last turn, which has its prefix in the cache."""
    turn: int = 0
    generated: int = 0
    """Tokens of this turn from earlier replicas."""
    expected: float = 0.0
    """Expected tokens of this turn on arrival."""
    moves: int = 0
    """Of this turn."""
    goes_to: str | None = None
    told_to_leave: bool = False
    """Its replica was, and it has not come back since."""
    left_at: float = 0.0
    stay: tuple[Held, float] | None = None
    """The last one, and the mean number of requests beside it."""
    tier_seconds: dict[int, float] = field(default_factory=dict[int, float])
    """Of the last stay."""
    stays: list[Stay] = field(default_factory=list[Stay])
    """Of this turn."""

    @property
    def key(self) -> Hashable:
        """Name of its present prompt: siblings share it."""
        return self.prompt, self.turn


class Conversations:
    """Conversations by request id: all with a request in flight, and the last ``limit`` of the others.

    Those in flight are never evicted: the response of a moved request would be cut off.
    """

    def __init__(self, limit: int) -> None:
        self.busy: dict[str, Conversation] = {}
        self._idle: LRUCache[str, Conversation] = LRUCache(limit)

    def __len__(self) -> int:
        return len(self.busy) + len(self._idle)

    def __iter__(self) -> Iterator[Conversation]:
        """All conversations, those in flight first."""
        yield from [*self.busy.values(), *self._idle.values()]

    def get(self, request_id: str) -> Conversation | None:
        """The conversation, if known."""
        return self.busy.get(request_id) or self._idle.get(request_id)

    def hold(self, request_id: str, talk: Conversation) -> None:
        """Keep a conversation until :meth:`rest`."""
        self._idle.pop(request_id, None)
        self.busy[request_id] = talk

    def rest(self, request_id: str) -> None:
        """The conversation has no request in flight any more."""
        talk = self.busy.pop(request_id, None)
        if talk is not None:
            self._idle[request_id] = talk
