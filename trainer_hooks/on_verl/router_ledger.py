"""Which requests are where, how much each replica has still to do, and where the next one goes. Pure Python."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count


@dataclass(kw_only=True)
class Held:
    """A request on a replica.

    Attributes:
        request_id: of the conversation that it is a turn of.
        server: the replica.
        prompt: what siblings share.
        prompt_tokens: that the replica had to read.
        expected: tokens that it is expected to generate still.
        since: when it came, in seconds.
        generated: of its tokens that it had before.
        server_request_id: what the replica calls it; None where nobody said.
        request_seconds: of the replica when it came, see ``Watch``.
        tier_seconds: likewise.
        order: of arrival.
    """

    request_id: str
    server: str
    prompt: Hashable
    prompt_tokens: int
    expected: float
    since: float
    generated: int = 0
    server_request_id: str | None = None
    request_seconds: float = 0.0
    tier_seconds: Mapping[int, float] = field(default_factory=dict[int, float])
    order: int = field(default_factory=count().__next__)

    @property
    def outstanding(self) -> float:
        """Tokens to read and expected to generate."""
        return self.prompt_tokens + self.expected


class Ledger:
    """Requests by replica. A request is there from :meth:`hold` to :meth:`drop`, and no longer than its replica."""

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self.running: dict[str, int] = {}
        self.load: dict[str, float] = {}
        self._held: dict[str, list[Held]] = {}
        self._siblings: dict[tuple[str, Hashable], int] = {}
        self.add_servers(servers)

    def add_servers(self, servers: Iterable[str]) -> None:
        """New replicas; those that are known keep their requests."""
        for server in servers:
            self.running.setdefault(server, 0)
            self.load.setdefault(server, 0.0)

    def remove_servers(self, servers: Iterable[str]) -> list[Held]:
        """Replicas that are gone or failed, and the requests that went with them."""
        gone = {server for server in servers if server in self.running}
        lost = [held for held in self.everything() if held.server in gone]
        for held in lost:
            self._take(held)
        for server in gone:
            del self.running[server], self.load[server]
        return lost

    def everything(self) -> list[Held]:
        """All requests, in the order in which they came."""
        return sorted((held for each in self._held.values() for held in each), key=lambda held: held.order)

    def of(self, request_id: str) -> list[Held]:
        """Requests of one conversation."""
        return self._held.get(request_id, [])

    def choose(self, prompt: Hashable, prompt_tokens: int, expected: float, *, home: str | None) -> str:
        """Replica for a request: the least outstanding tokens, siblings apart, at home while it pays.

        At home the prompt need not be read again: a turn stays unless another replica has fewer outstanding tokens by
        more than its prompt. Others go to the replica with the fewest siblings, among those whose outstanding tokens
        exceed the least by no more than half of what the request is expected to generate: lengths of siblings are
        alike, so that together they would crowd their replica to the end.

        Raises:
            RuntimeError: there is no replica; verl's clients look for these words.
        """
        if not self.running:
            raise RuntimeError("No available servers in load balancer")
        least = min(self.load.values())
        if home in self.load and self.load[home] <= least + prompt_tokens:
            return home
        near = least + expected / 2
        return min(
            (server for server, load in self.load.items() if load <= near),
            key=lambda server: (self._siblings.get((server, prompt), 0), self.load[server], self.running[server]),
        )

    def hold(self, held: Held) -> None:
        """The request is on its replica now."""
        self._held.setdefault(held.request_id, []).append(held)
        self.running[held.server] += 1
        self.load[held.server] += held.outstanding
        key = held.server, held.prompt
        self._siblings[key] = self._siblings.get(key, 0) + 1

    def drop(self, request_id: str, server: str) -> Held | None:
        """The request has left its replica; None if it was not there."""
        for held in self.of(request_id):
            if held.server == server:
                self._take(held)
                return held
        return None

    def drop_any(self, server: str) -> Held | None:
        """A request without a name has left: the one that came first."""
        first = min((h for each in self._held.values() for h in each if h.server == server), default=None, key=_order)
        if first is not None:
            self._take(first)
        return first

    def expect(self, held: Held, expected: float) -> None:
        """Correct what a request is expected to generate."""
        self.load[held.server] += expected - held.expected
        held.expected = expected

    def _take(self, held: Held) -> None:
        mates = self._held[held.request_id]
        mates.remove(held)
        if not mates:
            del self._held[held.request_id]
        self.running[held.server] -= 1
        # to the last bit, so that an empty replica has nothing outstanding
        self.load[held.server] = self.load[held.server] - held.outstanding if self.running[held.server] else 0.0
        key = held.server, held.prompt
        self._siblings[key] -= 1
        if not self._siblings[key]:
            del self._siblings[key]


def _order(held: Held) -> int:
    return held.order
