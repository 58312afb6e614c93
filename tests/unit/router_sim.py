"""Replicas that decode the faster the fewer requests they have, behind a router; time is counted, not spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equipoise.trainer_hooks.on_verl.router.actor import TokenAwareRouter

BASE_S, PER_REQUEST_S = 0.010, 0.010


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Replica:
    """A handle of the router's, and the requests behind it: tokens left by server request id."""

    name: str
    left: dict[str, float] = field(default_factory=dict[str, float])
    told_to_go: list[str] = field(default_factory=list[str])

    @property
    def step_s(self) -> float:
        return BASE_S + PER_REQUEST_S * len(self.left)

    def decode(self, seconds: float) -> None:
        steps = seconds / self.step_s
        for name in self.left:
            self.left[name] -= steps

    @property
    def abort_request(self) -> Replica:
        return self

    def remote(self, server_request_id: str, reset_prefix_cache: bool = True) -> None:
        assert not reset_prefix_cache
        self.told_to_go.append(server_request_id)


def draw(seed: int, *, prompts: int, siblings: int, longest: int = 8192) -> list[list[list[int]]]:
    """Lengths by prompt of two rollouts of the same prompts: long-tailed over prompts, and alike within one."""
    rng = np.random.default_rng(seed)
    middle = rng.lognormal(6.0, 1.0, size=(1, prompts, 1))
    return np.clip(middle * rng.lognormal(0, 0.4, (2, prompts, siblings)), 1, longest).astype(int).tolist()


def prompt_of(number: int) -> list[int]:
    return [number, *range(50 + number % 50)]


def routed(num: int, clock: Clock | None = None, server: Any = Replica, **config: Any) -> TokenAwareRouter:
    servers = {f"s{i}": object() if server is object else server(f"s{i}") for i in range(num)}
    return TokenAwareRouter(servers, {"response_length": 1000, "transfer": "none", **config}, clock=clock or Clock())


def ask(router: TokenAwareRouter, request: str, prompt: int | list[int] = 0) -> str:
    ids = prompt_of(prompt) if isinstance(prompt, int) else prompt
    return router.acquire_server(request, prompt_ids=ids, server_request_id=request)[0]


def answer(router: TokenAwareRouter, request: str, server: str, tokens: int = 100) -> None:
    router.release_server(server, request)
    router.report(request, tokens, aborted=False)


def rollout(
    router: Any,
    clock: Clock,
    replicas: dict[str, Replica],
    lengths: Sequence[Sequence[int]],
    *,
    at_once: int | None = None,
) -> tuple[float, list[list[int]]]:
    """Ask for all responses, siblings in a row, at most ``at_once`` at a time.

    Returns:
        Seconds until the last is done, and the tokens of each response in the order asked for.
    """
    ours = isinstance(router, TokenAwareRouter)
    queue = [(p, i) for p, row in enumerate(lengths) for i in range(len(row))]
    done = [[0 for _ in row] for row in lengths]
    started = clock.now
    asked: dict[tuple[int, int], int] = {}
    where: dict[tuple[int, int], str] = {}

    def ask(key: tuple[int, int]) -> None:
        asked[key] = done[key[0]][key[1]]
        name = f"{started}/{key}"
        extra: dict[str, Any] = {
            "prompt_ids": prompt_of(key[0]) + [0] * asked[key],
            "server_request_id": f"{key[0]}.{key[1]}",
        }
        where[key], _ = router.acquire_server(name, **(extra if ours else {}))
        replicas[where[key]].left[f"{key[0]}.{key[1]}"] = lengths[key[0]][key[1]] - asked[key]

    def leave(key: tuple[int, int], *, aborted: bool) -> None:
        server = where.pop(key)
        left = replicas[server].left.pop(f"{key[0]}.{key[1]}")
        done[key[0]][key[1]] = lengths[key[0]][key[1]] - (round(left) if aborted else 0)
        router.release_server(server, f"{started}/{key}")
        if ours and router.report(f"{started}/{key}", done[key[0]][key[1]] - asked[key], aborted=aborted):
            ask(key)

    while queue or where:
        while queue and (at_once is None or len(where) < at_once):
            ask(queue.pop(0))
        wait = min(min(r.left.values()) * r.step_s for r in replicas.values() if r.left)
        check = router.check() if ours else None
        if check is not None:
            wait = min(wait, max(check, 1e-3))
        clock.now += wait
        for replica in replicas.values():
            replica.decode(wait)
        for key, server in list(where.items()):
            name = f"{key[0]}.{key[1]}"
            if replicas[server].left[name] <= 1e-6:
                leave(key, aborted=False)
            elif name in replicas[server].told_to_go:
                replicas[server].told_to_go.remove(name)
                leave(key, aborted=True)
        for replica in replicas.values():
            replica.told_to_go.clear()  # whose request had finished
    return clock.now - started, done
