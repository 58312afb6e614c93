"""The policies to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equipoise._arrays import IntArray, counts, iota
from equipoise.report.setting import Responses, Setting
from equipoise.report.simulation import Policy, Snapshot
from equipoise.rollout.policy.holdings import NO_LIMIT, Holdings
from equipoise.rollout.policy.lengths import expected_remaining
from equipoise.rollout.policy.moves import Terms, lower_tiers, plan_moves
from equipoise.rollout.policy.spread import spread_siblings

Placement = Callable[[Responses, Setting], IntArray]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A way to run a rollout: a name, where requests start, what moves, and whether all tiers have graphs."""

    name: str
    place: Placement
    policy: Policy | None
    one_shape: bool = False


def side_by_side(responses: Responses, setting: Setting) -> IntArray:
    """Siblings together: rank 0 gets the first rows, as in verl's split."""
    return iota(responses.length.size) // setting.requests_per_rank


def siblings_apart(responses: Responses, setting: Setting) -> IntArray:
    """Siblings on different ranks."""
    return spread_siblings(responses.prompt.tolist(), setting.num_ranks)


def recipe(snapshot: Snapshot, setting: Setting) -> tuple[IntArray, IntArray]:
    """The recipe's policy, restated from its description.

    Waiting requests first fill free slots, on the least crowded rank first. If none wait and the mean count fits into a
    tier below the fullest rank's, ranks above the smallest such tier give up the first requests in their lists. In
    turn, receivers, the emptiest first, take as many from the next giver as both allow.
    """
    held = counts(snapshot.rank, setting.num_ranks)
    waits = counts(snapshot.rank[~snapshot.running], setting.num_ranks)
    if waits.any():
        return _recipe_waiting(snapshot, setting, held, waits)
    tiers = np.array(setting.step_time.tiers)
    target_index = int(np.searchsorted(tiers, float(held.mean())))
    if target_index >= int(np.searchsorted(tiers, int(held.max()))):
        return iota(0), iota(0)
    target = int(tiers[target_index])
    first = np.cumsum(held) - held
    givers = [list(range(int(first[r]), int(first[r] + held[r] - target))) for r in np.flatnonzero(held > target)]
    takers = [[int(r), int(target - held[r])] for r in np.flatnonzero(held < target)]
    leaving: list[int] = []
    to: list[int] = []
    while givers:
        turn = 0
        for taker in sorted(takers, key=lambda each: -each[1]):
            some = givers[turn][: taker[1]]
            givers[turn] = givers[turn][len(some) :]
            taker[1] -= len(some)
            leaving += some
            to += [taker[0]] * len(some)
            turn = (turn + 1) % len(givers)
        givers = [each for each in givers if each]
        takers = [each for each in takers if each[1]]
    return np.array(leaving, dtype=np.int64), np.array(to, dtype=np.int64)


def _recipe_waiting(snapshot: Snapshot, setting: Setting, held: IntArray, waits: IntArray) -> tuple[IntArray, IntArray]:
    free = np.where(waits > 0, 0, setting.places - held)
    queue = np.flatnonzero(~snapshot.running)[: int(free.sum())]
    load = np.array(held, dtype=np.int64)
    to: list[int] = []
    for _ in range(queue.size):
        best = int(np.argmin(np.where(load < setting.places, load, NO_LIMIT) + np.where(waits > 0, NO_LIMIT // 2, 0)))
        to.append(best)
        load[best] += 1
    return queue, np.array(to, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Ours:
    """`plan_rebalance` with predicted lengths, on the arrays of the simulation.

    Attributes:
        victims: as there.
        kv_price: seconds worth giving up to save one GB.
        hysteresis: as there.
    """

    victims: str = "kv"
    kv_price: float = 0.7
    hysteresis: float = 0.1

    def __call__(self, snapshot: Snapshot, setting: Setting) -> tuple[IntArray, IntArray]:
        """Positions that move, and their new ranks."""
        ranks, at_most = setting.num_ranks, snapshot.responses.longest - snapshot.generated
        terms = Terms(
            tiers=np.array(setting.step_time.tiers, dtype=np.int64),
            slots=np.full(ranks, setting.places, dtype=np.int64),
            kv_capacity=np.full(ranks, NO_LIMIT, dtype=np.int64),
            step_time=setting.step_time,
            transfer=setting.transfer,
            victims=self.victims,
            hysteresis=self.hysteresis,
            kv_price=0.0 if setting.recompute else self.kv_price * setting.kv_bytes_per_token / 1e9,
            steps_to_next_check=setting.check_interval,
            most_steps=float(at_most.max()),
        )
        held = counts(snapshot.rank, ranks)
        if not lower_tiers(held, terms) and not (held > setting.places).any():
            return iota(0), iota(0)
        done, responses = snapshot.finished, snapshot.responses
        remaining = expected_remaining(
            responses.prompt[snapshot.index],
            snapshot.generated.astype(np.float64),
            (responses.prompt[done], responses.length[done].astype(np.float64)),
            np.full(int(responses.prompt.max()) + 1, np.nan),
        )
        holdings = Holdings(
            held=held,
            kv_tokens=snapshot.kv_tokens,
            num_tokens=snapshot.generated + responses.prompt_tokens[snapshot.index],
            running=snapshot.running,
            remaining=np.minimum(remaining, at_most),
            moved=snapshot.moved > 0,
        )
        return plan_moves(holdings, terms)


def contestants(planner: Ours) -> list[Contestant]:
    """The policies to compare; the first one is the baseline."""
    return [
        Contestant(name="no moves, one shape", place=side_by_side, policy=None, one_shape=True),
        Contestant(name="no moves, tiers", place=side_by_side, policy=None),
        Contestant(name="recipe", place=side_by_side, policy=recipe),
        Contestant(name="ours, planner only", place=side_by_side, policy=planner),
        Contestant(name="no moves, siblings apart", place=siblings_apart, policy=None),
        Contestant(name="recipe, siblings apart", place=siblings_apart, policy=recipe),
        Contestant(name="ours", place=siblings_apart, policy=planner),
    ]
