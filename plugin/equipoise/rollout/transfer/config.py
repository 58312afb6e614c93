"""When requests move, and what a check leaves on record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args, get_type_hints

from equipoise._checks import falling, numbers, positive
from equipoise.config import TIERS, RolloutConfig
from equipoise.errors import InvalidInput, must

_TRANSFERS: tuple[str, ...] = get_args(get_type_hints(RolloutConfig)["transfer"])


@dataclass(frozen=True, kw_only=True)
class RebalancerConfig:
    """When and how requests move. Defaults are those of :class:`equipoise.config.RolloutConfig`.

    Args:
        check_interval: decode steps between checks; a rank without requests waits for the next one.
        tiers: decode sizes in rows, falling; those of the engine.
        multi_graph: whether a step costs what its tier costs. False: one decode shape, moves are planned by counts.
        transfer: "recompute", tokens move and the receiver prefills them; "kv", the cache moves too; "none", nothing
            moves.
        min_gain: least predicted seconds that justify moving; counts once step times are known from ``profile``.
        profile: time decode steps, and let a move take place only where it pays by these times.
        profile_interval: decode steps between two that are timed.
        timeout_s: seconds that a rank may let others wait; ``check_interval`` steps must fit.

    Raises:
        InvalidInput: a value out of its range.
    """

    check_interval: int = RolloutConfig.check_interval
    tiers: tuple[int, ...] = TIERS
    multi_graph: bool = RolloutConfig.multi_graph
    transfer: str = RolloutConfig.transfer
    min_gain: float = RolloutConfig.min_gain
    profile: bool = RolloutConfig.profile
    profile_interval: int = RolloutConfig.profile_interval
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("check_interval", "profile_interval"):
            positive(name, getattr(self, name), "pass decode steps")
        numbers(self, real=("min_gain", "timeout_s"), remedy="pass seconds")
        if self.transfer not in _TRANSFERS:
            raise InvalidInput(must("transfer", f"be one of {list(_TRANSFERS)}", self.transfer, "choose one"))
        if not 0 <= self.min_gain < float("inf"):
            raise InvalidInput(must("min_gain", "be finite and at least 0", self.min_gain, "pass seconds"))
        if not 0 < self.timeout_s < float("inf"):
            raise InvalidInput(must("timeout_s", "be finite and above 0", self.timeout_s, "pass seconds"))
        object.__setattr__(self, "tiers", falling("tiers", self.tiers, "pass for example (64, 32, 16, 8, 4)"))

    @classmethod
    def of(cls, node: RolloutConfig, *, timeout_s: float = 600.0) -> RebalancerConfig:
        """From the node ``equipoise.rollout`` of a trainer's configuration.

        >>> RebalancerConfig.of(RolloutConfig(check_interval=7)).check_interval
        7
        """
        return cls(
            check_interval=node.check_interval,
            tiers=tuple(node.tiers),
            multi_graph=node.multi_graph,
            transfer=node.transfer,
            min_gain=node.min_gain,
            profile=node.profile,
            profile_interval=node.profile_interval,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one check saw and did; the same on every rank but for ``seconds`` and ``waited_s``.

    Args:
        step: decode steps before it.
        running: requests that run, by rank.
        waiting: requests that wait, by rank.
        tier: that the group would decode at.
        tier_unmoved: that it would, had nothing ever moved.
        num_moved: requests that changed rank.
        kv_bytes: of their caches.
        predicted_s: saving that the step times predict for these moves.
        seconds: of the exchange, on this rank.
        waited_s: that this rank waited for others to come to the check.
    """

    step: int
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    tier: int
    tier_unmoved: int
    num_moved: int
    kv_bytes: int
    predicted_s: float
    seconds: float
    waited_s: float
