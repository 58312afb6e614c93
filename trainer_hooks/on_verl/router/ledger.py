"""Which requests are where, how much work each replica has left, and where the next request goes. Pure Python."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count


@dataclass(kw_only=True)
class Held:
    """A request on a replica.

    Attributes:
        request_id: names the conversation that this is a turn of.
        server: id of the replica.
        prompt: name of its prompt, which siblings share.
        prompt_tokens: tokens that the replica had to prefill.
        expected: tokens it is expected to generate from here.
        since: time of arrival, in seconds.
        generated: response tokens among ``prompt_tokens``, from earlier stays.
        server_request_id: the replica's name for it; None if the client gave none.
        request_seconds: the replica's value on arrival, see ``Watch``.
        tier_seconds: likewise.
        order: arrival index.
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
        """Tokens to prefill and expected to be generated."""
        return self.prompt_tokens + self.expected


class Ledger:
    """Requests by replica: each from :meth:`hold` to :meth:`drop`, or until its replica is removed."""

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self.running: dict[str, int] = {}
        self.load: dict[str, float] = {}
        self._held: dict[str, list[Held]] = {}
        self._siblings: dict[tuple[str, Hashable], int] = {}
        self.add_servers(servers)

    def add_servers(self, servers: Iterable[str]) -> None:
        """Add replicas; those already known keep their requests."""
        for server in servers:
            self.running.setdefault(server, 0)
            self.load.setdefault(server, 0.0)

    def remove_servers(self, servers: Iterable[str]) -> list[Held]:
        """Remove replicas that are gone or failed; return the requests that went with them."""
        gone = {server for server in servers if server in self.running}
        lost = [held for held in self.everything() if held.server in gone]
        for held in lost:
            self._take(held)
        for server in gone:
            del self.running[server], self.load[server]
        return lost

    def everything(self) -> list[Held]:
        """Return all requests, in order of arrival."""
        return sorted((held for each in self._held.values() for held in each), key=lambda held: held.order)

    def of(self, request_id: str) -> list[Held]:
        """Return the requests of one conversation."""
        return self._held.get(request_id, [])

    def choose(self, prompt: Hashable, prompt_tokens: int, expected: float, *, home: str | None) -> str:
        """Choose a replica: few outstanding tokens, few siblings; later turns stay where their prefix is cached.

        ``home`` has the prompt's prefix in its cache: a turn stays there unless another replica has fewer outstanding
        tokens by more than its prompt. Any other request goes to the replica with the fewest siblings, among those
        whose outstanding tokens exceed the least by no more than half of what it is expected to generate. Siblings are
        about equally long, so together they would crowd one replica until the end.

        Raises:
            RuntimeError: there is no replica; verl's clients look for this text.
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
        """Note that a request is on its replica."""
        self._held.setdefault(held.request_id, []).append(held)
        self.running[held.server] += 1
        self.load[held.server] += held.outstanding
        key = held.server, held.prompt
        self._siblings[key] = self._siblings.get(key, 0) + 1

    def drop(self, request_id: str, server: str) -> Held | None:
        """Note that a request has left its replica, and return it; None if it was not there."""
        for held in self.of(request_id):
            if held.server == server:
                self._take(held)
                return held
        return None

    def drop_any(self, server: str) -> Held | None:
        """Note that some request has left a replica, and return it: the first to arrive, as the caller did not say."""
        first = next((held for held in self.everything() if held.server == server), None)
        if first is not None:
            self._take(first)
        return first

    def expect(self, held: Held, expected: float) -> None:
        """Update the expected length of a request."""
        self.load[held.server] += expected - held.expected
        held.expected = expected

    def _take(self, held: Held) -> None:
        mates = self._held[held.request_id]
        mates.remove(held)
        if not mates:
            del self._held[held.request_id]
        self.running[held.server] -= 1
        # an empty replica has exactly 0 outstanding; float differences would leave a residue
        self.load[held.server] = self.load[held.server] - held.outstanding if self.running[held.server] else 0.0
        key = held.server, held.prompt
        self._siblings[key] -= 1
        if not self._siblings[key]:
            del self._siblings[key]
