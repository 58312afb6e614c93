"""Ranks that act together, one of which fails: who waits how long, and who raises what.

A room lists the points at which its ranks meet in a module with a function ``meetings() -> dict[str, Meeting]``, which
each rank calls once its process group is there. ``run(module, folder)`` starts this file as a program. It forks gloo
ranks from a process that has imported the module, makes one of them fail at each point, and writes down what each
rank raised and after how long. All votes of a world take place in one set of ranks, which shows that they leave no
state behind; a meeting inside torch's own collectives, which a failure breaks, has ranks of its own.
"""

# torch.distributed is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 15.0
"""Of every process group: the one time-out that no rank may wait longer than."""
SLACK_S = 10.0
"""For what a rank does before it waits, on a machine that is busy."""
WORLDS = (2, 3)


class HomeMade(Exception):
    """An exception that is on no list, and cannot be made from a text."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__()
        self.code, self.reason = code, reason

    def __str__(self) -> str:
        return f"code {self.code}: {self.reason}"


EXCEPTIONS: dict[str, Callable[[], Exception]] = {
    "AssertionError": lambda: AssertionError("what cannot be"),
    "KeyError": lambda: KeyError("missing"),
    "HomeMade": lambda: HomeMade(7, "no list knows me"),
}


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A point at which ranks meet.

    Attributes:
        run: what every rank calls; given a folder that all ranks see, a new one for each call.
        target: what fails on one rank, as (owner, name of its attribute): an object, class or module.
        voted: whether all ranks raise the same error; else each ends within the time-out with an error of its own.
        first_only: whether only rank 0 calls the target.
    """

    run: Callable[[Path], Any]
    target: tuple[Any, str]
    voted: bool = True
    first_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of a meeting at which one failed.

    Attributes:
        name: of the meeting.
        bad: the rank that was made to fail.
        kind: of the exception.
        called: whether the target was called, on the rank that fails.
        error: class and text; empty if there was none.
        seconds: how long it took.
        again: the error of the same meeting without a failure, straight after; empty if all went well.
    """

    name: str
    bad: int
    kind: str
    called: bool
    error: str
    seconds: float
    again: str = ""


@contextlib.contextmanager
def failing(target: tuple[Any, str], error: Exception | None) -> Generator[list[int]]:
    """The first call of the target raises ``error``, if there is one; its calls are counted."""
    owner, name = target
    inner, saved, calls = getattr(owner, name), vars(owner).get(name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if error is not None and calls[0] == 1:
            raise error
        return inner(*args, **kwargs)

    setattr(owner, name, staticmethod(call) if isinstance(saved, (classmethod, staticmethod)) else call)
    try:
        yield calls
    finally:
        setattr(owner, name, inner if saved is None else saved)


def attempt(action: Callable[[], Any]) -> tuple[str, float]:
    """The error of a call as text, and its seconds."""
    began = time.monotonic()
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever is raised is what the test asks for
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


def see(meetings: dict[str, Meeting], names: list[str], folder: Path) -> list[Seen]:
    """What this rank sees of the meetings of these names, with one rank or another failing."""
    seen: list[Seen] = []
    kinds = list(EXCEPTIONS)
    for at, name in enumerate(names):
        meeting, kind = meetings[name], kinds[at % len(kinds)]
        bad = 0 if meeting.first_only else at % dist.get_world_size()
        error = EXCEPTIONS[kind]() if dist.get_rank() == bad else None
        with failing(meeting.target, error) as calls:
            text, seconds = attempt(partial(meeting.run, folder / f"{at}"))
        again = attempt(partial(meeting.run, folder / f"{at}-again"))[0] if meeting.voted else ""
        called = bool(calls[0]) or dist.get_rank() != bad
        seen.append(Seen(name=name, bad=bad, kind=kind, called=called, error=text, seconds=seconds, again=again))
    return seen


def _rank(rank: int, world: int, module: str, names: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    meetings = importlib.import_module(module).meetings()
    dist.barrier()
    torch.save([vars(each) for each in see(meetings, names, folder)], folder / f"{rank}.pt")
    os._exit(0)  # a broken group cannot be left in peace


def main(module: str, folder: Path) -> None:
    """All meetings of a module, in worlds of each size."""
    fork = multiprocessing.get_context("fork")
    table: dict[str, Meeting] = importlib.import_module(module).meetings(planning=True)
    voted = [name for name, meeting in table.items() if meeting.voted]
    sets = [voted, *([name] for name, meeting in table.items() if not meeting.voted)]
    for world in WORLDS:
        for number, names in enumerate(sets):
            place = folder / f"{world}-{number}"
            place.mkdir(parents=True)
            ranks = [fork.Process(target=_rank, args=(rank, world, module, names, place)) for rank in range(world)]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join()


def run(module: str, folder: Path, *, timeout_s: float = 900) -> dict[int, list[list[Seen]]]:
    """What the ranks of each world saw, rank by rank.

    Args:
        module: that has the table.
        folder: an empty one.
        timeout_s: for all of it; a rank that waits longer than its time-out is told by its own seconds.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.together_rig", module, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[int, list[list[Seen]]] = {}
    for world in WORLDS:
        ranks: list[list[Seen]] = [[] for _ in range(world)]
        for place in sorted(folder.glob(f"{world}-*")):
            for rank in range(world):
                path = place / f"{rank}.pt"
                assert path.exists(), (
                    f"rank {rank} of {world} ended without a word in {place.name}: {done.stderr[-4000:]}"
                )
                ranks[rank] += [Seen(**each) for each in torch.load(path, weights_only=True)]
        found[world] = ranks
    return found


def check(seen: list[Seen], *, voted: bool) -> None:
    """One rank failed, none waited longer than the time-out, all raised; where they vote, the same error.

    Args:
        seen: what each rank saw of one failure at one meeting.
        voted: of the meeting.
    """
    bad, kind = seen[0].bad, seen[0].kind
    assert all(each.called for each in seen), "the target is never called there"
    assert max(each.seconds for each in seen) < SLACK_S + (0 if voted else TIMEOUT_S), seen
    assert all(each.error for each in seen), seen
    if not voted:
        assert kind in seen[bad].error, seen
        return
    assert len({each.error for each in seen}) == 1, seen
    for words in (f"rank {bad} ", kind, str(EXCEPTIONS[kind]())):
        assert words in seen[0].error, seen
    assert [each.again for each in seen] == [""] * len(seen), seen


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
