"""Which unfinished requests move from crowded ranks to idle ones: counts and lengths in, moves out."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equipoise._arrays import FloatArray, IntArray, int_sums, sums
from equipoise._checks import is_amount
from equipoise.config import TIERS
from equipoise.errors import InvalidInput, must
from equipoise.rollout.policy.holdings import (
    NO_LIMIT,
    Holdings,
    check_room,
    checked_ids,
    checked_ranks,
    checked_tiers,
    gather,
    per_rank,
)
from equipoise.rollout.policy.requests import Move, Request
from equipoise.rollout.policy.victims import deal, fit, pick, quotas
from equipoise.rollout.policy.worth import StepSeconds, TransferCost, exchange_seconds, kept_by_waiting, saved_seconds

VICTIMS = ("kv", "longest")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a plan must respect: the arguments of `plan_rebalance`, with limits per rank and ascending tiers."""

    tiers: IntArray
    slots: IntArray
    kv_capacity: IntArray
    min_gain: float = 0.0
    step_time: StepSeconds | None = None
    transfer: TransferCost = field(default_factory=TransferCost)
    victims: str = "kv"
    hysteresis: float = 0.0
    kv_price: float = 0.0
    steps_to_next_check: int = 0
    most_steps: float = float("inf")

    def __post_init__(self) -> None:
        for name in ("min_gain", "hysteresis", "kv_price", "steps_to_next_check"):
            value = getattr(self, name)
            if not is_amount(value):
                raise InvalidInput(must(name, "be finite and at least 0", value, "pass 0 to leave it out"))
            if value and self.step_time is None and name != "steps_to_next_check":
                raise InvalidInput(must("step_time", f"be given with {name}", None, "pass a step-time model"))
        if self.kv_price and not self.steps_to_next_check:
            remedy = "pass the check interval"
            raise InvalidInput(must("steps_to_next_check", "be at least 1 with kv_price", 0, remedy))
        if self.most_steps != float("inf") and not is_amount(self.most_steps):
            remedy = "leave it out if there is no limit"
            raise InvalidInput(must("most_steps", "be at least 0", self.most_steps, remedy))
        if not (self.step_time is None or callable(self.step_time)):
            remedy = "fit one by equipoise.StepTime.fit"
            raise InvalidInput(must("step_time", "be callable with a tier and KV tokens", self.step_time, remedy))
        transfer: Any = self.transfer
        if not isinstance(transfer, TransferCost):
            raise InvalidInput(must("transfer", "be a TransferCost", transfer, "leave it out if moves cost nothing"))
        if self.victims not in VICTIMS:
            raise InvalidInput(must("victims", f"be one of {', '.join(VICTIMS)}", self.victims, "choose one"))

    @property
    def needs_lengths(self) -> bool:
        """Whether expected lengths matter beyond breaking ties."""
        return self.step_time is not None or self.victims == "longest"

    @property
    def limits_memory(self) -> bool:
        """Whether KV tokens are limited, in which case a waiting request's tokens count too."""
        return bool((self.kv_capacity < NO_LIMIT).any())

    @property
    def prefills(self) -> bool:
        """Whether prefilling a moved request has a cost, so that its tokens matter besides its KV tokens."""
        return self.transfer.prefill_s_per_token > 0

    @property
    def looks_at_counts_only(self) -> bool:
        """Whether only requests on crowded ranks matter."""
        return not (self.needs_lengths or self.limits_memory or self.prefills)


def plan_rebalance(
    requests_by_rank: Sequence[Sequence[Request] | None],
    *,
    tiers: Sequence[int] = TIERS,
    slots: int | Sequence[int] | None = None,
    min_gain: float = 0.0,
    step_time: StepSeconds | None = None,
    kv_capacity: int | Sequence[int] | None = None,
    transfer: TransferCost | None = None,
    victims: str = "kv",
    hysteresis: float = 0.0,
    moved_before: Collection[Hashable] = (),
    kv_price: float = 0.0,
    steps_to_next_check: int = 0,
    most_steps: float = float("inf"),
) -> list[Move]:
    """Moves after which every rank fits the smallest decode tier that all ranks can reach.

    Ranks that decode in lockstep all pay for the tier of the fullest rank, the smallest T ≥ max n, where n is a rank's
    number of requests. T is reachable if Σ max(n - T, 0) ≤ Σ max(min(T, slots) - n, 0); then exactly Σ max(n - T, 0)
    requests move, the minimum. Nothing moves unless T falls. The one exception: with ``slots``, requests that wait on a
    rank with more requests than slots first fill free slots elsewhere.

    On each crowded rank, waiting requests move first, then those with the smallest KV caches. Receivers get equal
    numbers as far as their room allows, and the requests of one rank are spread over them.

    With ``step_time``, a tier is chosen only if the predicted saving is at least (1 + hysteresis) × the predicted
    seconds of the exchange + min_gain; otherwise the next larger tier is tried.

    Args:
        requests_by_rank: unfinished requests of each rank, running and waiting; [] for an idle rank.
        tiers: decode-graph sizes in requests, descending. Nothing moves if even the largest is too small.
        slots: the most requests that a rank can hold, one number or one per rank.
        min_gain: the least predicted saving in seconds that justifies a move; needs ``step_time``.
        step_time: seconds of a decode step from the tier and the KV tokens of the fullest rank.
        kv_capacity: the most KV tokens that a rank can hold, one number or one per rank. Requests are placed largest
            first; a tier for which this fails is skipped.
        transfer: cost of an exchange; None for no cost.
        victims: "kv" moves the smallest caches; "longest" moves the requests expected to decode longest, to the ranks
            with the least expected work: more bytes now, fewer moves later.
        hysteresis: share by which the saving must exceed the cost; needs ``step_time``.
        moved_before: ids that moved recently; they leave a rank only if its other requests do not suffice.
        kv_price: seconds of decoding worth giving up to save the transfer of one KV token. If above 0, a move waits
            for the next check as long as requests that finish by then save more than the higher tier costs.
        steps_to_next_check: decode steps until the next call; required by ``kv_price``.
        most_steps: the most decode steps that any request can still take, from the limit on response length; bounds the
            saving.

    Returns:
        Moves by sender, each request at most once. The same input gives the same moves on every rank.

    Raises:
        InvalidInput: tiers are not descending, a rank is None, an id is on two ranks, or a limit or setting has the
            wrong type or is out of range.
        InfeasiblePlan: more requests run than there are slots.

    >>> crowded = [Request(i, num_tokens=100 + i, kv_tokens=100 + i) for i in range(6)]
    >>> plan_rebalance([crowded, []], tiers=(8, 4))
    [Move(from_rank=0, to_rank=1, request_id=0), Move(from_rank=0, to_rank=1, request_id=1)]
    """
    rising = checked_tiers(tiers)
    ranks = checked_ranks(requests_by_rank)
    before = checked_ids("moved_before", moved_before)
    terms = Terms(
        tiers=rising,
        slots=per_rank("slots", slots, len(ranks)),
        kv_capacity=per_rank("kv_capacity", kv_capacity, len(ranks)),
        min_gain=min_gain,
        step_time=step_time,
        transfer=TransferCost() if transfer is None else transfer,
        victims=victims,
        hysteresis=hysteresis,
        kv_price=kv_price,
        steps_to_next_check=steps_to_next_check,
        most_steps=most_steps,
    )
    held = np.array([len(requests) for requests in ranks], dtype=np.int64)
    if slots is not None:
        check_room(ranks, terms.slots)
    low = min([*lower_tiers(held, terms)[:1], *terms.slots[held > terms.slots].tolist()], default=None)
    if low is None:
        return []
    none: Sequence[Request] = ()
    crowded = [requests if len(requests) > low else none for requests in ranks]  # all possible senders
    holdings = gather(
        crowded if terms.looks_at_counts_only else ranks,
        before,
        tokens=terms.prefills,
        tokens_if_waiting=terms.limits_memory,
        lengths=terms.needs_lengths,
    )
    moving, to = plan_moves(holdings, terms, held=held)
    sender = holdings.rank[moving]
    others = np.cumsum(holdings.held - np.where(held > low, held, 0))
    at: list[int] = (moving - others[sender]).tolist()
    ids = [request.id for requests in crowded for request in requests]
    return list(map(Move, sender.tolist(), to.tolist(), (ids[i] for i in at)))


def plan_moves(holdings: Holdings, terms: Terms, *, held: IntArray | None = None) -> tuple[IntArray, IntArray]:
    """Indices of the requests that move and the rank each goes to: `plan_rebalance` on arrays, without its checks.

    Args:
        holdings: the requests; if only counts matter, those on crowded ranks suffice.
        terms: what to respect.
        held: requests of each rank, if ``holdings`` omits some.
    """
    counts = holdings.held if held is None else held
    waiting = fill_idle(holdings, terms, counts)
    if waiting[0].size:
        return waiting
    for tier in lower_tiers(counts, terms):
        excess = np.maximum(counts - tier, 0)
        leaving = pick(holdings, excess, longest=terms.victims == "longest")
        to = _place(holdings, leaving, _room(counts, tier, terms), terms)
        if to is not None and _pays(holdings, leaving, to, tier, terms):
            return leaving, to
    nothing = np.zeros(0, dtype=np.int64)
    return nothing, nothing


def lower_tiers(held: IntArray, terms: Terms) -> list[int]:
    """Tiers below the current one that all ranks can reach, the smallest first."""
    if held.size < 2:
        return []
    most = int(held.max())
    own = int(np.searchsorted(terms.tiers, most))
    return [
        int(tier)
        for tier in terms.tiers[:own]
        if int(np.maximum(held - tier, 0).sum()) <= int(_room(held, int(tier), terms).sum())
    ]


def fill_idle(holdings: Holdings, terms: Terms, held: IntArray) -> tuple[IntArray, IntArray]:
    """Requests that wait on ranks without a free slot, and the ranks whose free slots they fill.

    No rank gets more requests than the current tier.
    """
    nothing = np.zeros(0, dtype=np.int64)
    over = held > terms.slots
    if not over.any():
        return nothing, nothing
    decoding = int(np.minimum(held, terms.slots).max())
    own = min(int(np.searchsorted(terms.tiers, decoding)), terms.tiers.size - 1)
    room = _room(held, int(terms.tiers[own]), terms)
    waits = int_sums(holdings.rank, (~holdings.running).astype(np.int64), holdings.num_ranks)
    spare = np.where(over, np.minimum(held - terms.slots, waits), 0)
    leave = quotas(min(int(room.sum()), int(spare.sum())), spare)
    leaving = pick(holdings, leave, longest=terms.victims == "longest")
    to = _place(holdings, leaving, room, terms)
    return (leaving, to) if to is not None else (nothing, nothing)


def _room(held: IntArray, tier: int, terms: Terms) -> IntArray:
    return np.maximum(np.minimum(terms.slots, tier) - held, 0)


def _place(holdings: Holdings, leaving: IntArray, room: IntArray, terms: Terms) -> IntArray | None:
    if terms.limits_memory:
        return fit(holdings, leaving, room, terms.kv_capacity)
    weight = holdings.kv_tokens.astype(np.float64)
    load: FloatArray = np.zeros(room.size)
    if terms.victims == "longest":
        weight = holdings.expected
        load = sums(holdings.rank, weight, room.size)  # of a receiver: nothing leaves it
    return deal(weight[leaving], quotas(leaving.size, room), load)


def _pays(holdings: Holdings, leaving: IntArray, to: IntArray, tier: int, terms: Terms) -> bool:
    if terms.step_time is None:
        return True
    ranks, kv = holdings.num_ranks, holdings.kv_tokens
    before = int_sums(holdings.rank, kv, ranks)
    after = before - int_sums(holdings.rank[leaving], kv[leaving], ranks) + int_sums(to, kv[leaving], ranks)
    context = float(before.max()), float(after.max())
    saved = saved_seconds(holdings, tier, terms.tiers, terms.step_time, context, terms.most_steps)
    cost = exchange_seconds(holdings, leaving, to, terms.transfer)
    if not (saved > 0 and saved >= (1 + terms.hysteresis) * cost + terms.min_gain):
        return False
    if not terms.kv_price:
        return True
    steps = terms.steps_to_next_check
    most = int(holdings.held.max())
    own = int(terms.tiers[np.searchsorted(terms.tiers, most)]) if most <= int(terms.tiers[-1]) else most
    lost = steps * (terms.step_time(own, context[0]) - terms.step_time(tier, context[1]))
    return terms.kv_price * kept_by_waiting(holdings, leaving, tier, steps) <= lost
