"""When requests move, and the record of a check."""

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
        tiers: decode sizes in rows, descending; the same as the engine's.
        multi_graph: whether a step's cost depends on its tier. False: one decode shape; moves are planned by counts.
        transfer: "recompute" moves tokens, which the receiver prefills; "kv" also moves caches; "none" moves nothing.
        min_gain: the least predicted saving, in seconds, that justifies a move; applies once ``profile`` knows step
            times.
        profile: time decode steps, and move requests only if that pays by these times.
        profile_interval: time every n-th decode step.
        timeout_s: seconds that a rank may keep others waiting; must cover ``check_interval`` steps.

    Raises:
        InvalidInput: a value is out of range.
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
        """Take the settings from the node ``equipoise.rollout`` of a trainer's configuration.

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
    """The record of a check; the same on every rank except for ``seconds`` and ``waited_s``.

    Args:
        step: decode steps before it.
        running: running requests, by rank.
        waiting: waiting requests, by rank.
        tier: the group's decode tier.
        tier_unmoved: the tier if nothing had ever moved.
        num_moved: requests that changed rank.
        kv_bytes: bytes of their caches.
        predicted_s: predicted saving of these moves, in seconds.
        seconds: duration of the exchange on this rank.
        waited_s: how long this rank waited for others at the check.
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
