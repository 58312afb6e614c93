"""The structured configuration: the one home of every default. YAML under ``conf/equipoise`` holds presets only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, cast, get_args, get_type_hints

from equipoise._checks import is_amount, is_whole
from equipoise.errors import InvalidConfig, must, nearest

TIERS = (64, 32, 16, 8, 4)
"""Decode sizes unless others are asked for."""

Planner = Literal["equipoise", "verl"]
Cost = Literal["transformer", "token", "model", "fitted"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The node ``equipoise.rollout``: where requests are decoded, and which of them move."""

    enable: bool = False
    """True: requests go where the fewest tokens are expected, and unfinished ones move from crowded replicas to idle
    ones."""

    check_interval: int = 100
    """Decode steps between checks whether requests should move."""

    tiers: list[int] = field(default_factory=lambda: list(TIERS))
    """Decode sizes in requests, falling. Requests move where the fullest replica then fits a smaller one."""

    multi_graph: bool = True
    """False: one decode shape; moves are planned by counts of requests and not by times of tiers."""

    transfer: Literal["none", "recompute", "kv"] = "recompute"
    """How a request moves: not at all, as tokens that the receiver prefills, or with its cache. "recompute" works with
    every engine, hence the default. "kv" needs engines that hand caches out: those of :mod:`equipoise.rollout`, in verl
    the servers of a CPU run."""

    min_gain: float = 0.0
    """Least predicted seconds that justify moving; counts once step times are known from ``profile``."""

    profile: bool = True
    """Measure the time of a decode step at each tier, and let requests move only where that pays."""

    profile_interval: int = 4
    """Measurements that are skipped from one that is kept to the next, plus one."""

    max_prompts: int = 65536
    """Most prompts whose response lengths are remembered, and most conversations without a request under way; the
    least recently used is forgotten first."""

    def __post_init__(self) -> None:
        _check_kinds(self, "equipoise.rollout")
        for name in ("check_interval", "profile_interval", "max_prompts"):
            _require(is_whole(getattr(self, name), 1), self, name, "be a whole number of at least 1")
        _require(_is_number(self.min_gain), self, "min_gain", "be a number of seconds of at least 0")
        given: Any = self.tiers
        tiers = list(cast("list[Any]", given)) if isinstance(given, (list, tuple)) else []
        good = bool(tiers) and all(is_whole(tier, 1) for tier in tiers) and tiers == sorted(set(tiers), reverse=True)
        _require(good, self, "tiers", "be whole numbers of at least 1 that fall from one to the next")


@dataclass(frozen=True, kw_only=True)
class EquipoiseConfig:
    """The node ``equipoise`` of a trainer's configuration.

    What the trainer's own keys say already (mini-batch sizes, token caps, sequence parallelism) is read there.
    """

    enable: bool = True
    """False: the trainer runs as if Equipoise were not installed."""

    planner: Planner = "equipoise"
    """"equipoise" plans each step. "verl" leaves verl's own balancing alone and only measures it."""

    algorithm: Literal["refined", "kk", "lpt"] = "refined"
    """How rows are divided: a search, or one of its starting rules alone."""

    objective: Literal["lockstep", "rank"] = "lockstep"
    """"lockstep": ranks meet at every micro-batch, as under FSDP. "rank": they meet once per optimizer step."""

    composition: Literal["keep", "stratified", "sorted"] = "keep"
    """"keep": each optimizer step has the prompts that the trainer's batch order gives it. "stratified": the same mix
    of lengths in each. "sorted": rows of like length, the longest first; cheapest, and biased."""

    cost: Cost = "transformer"
    """"transformer": cost_linear · L + cost_quadratic · L². "token": the tokens. "model": the FLOPs of the actor's own
    configuration. "fitted": seconds, refitted after each step to the measured times of its micro-batches; as "model"
    until there are enough of them, and whenever the fit is poor."""

    cost_linear: float = 24576.0
    """Cost of one token with cost=transformer; the default is verl's, for hidden size 4096 (6 × hidden size in
    general)."""

    cost_quadratic: float = 1.0
    """Cost of one pair of tokens of a row with cost=transformer."""

    fit_min_r2: float = 0.8
    """The least r² at which cost=fitted plans with its fit. At 0.8 what lengths leave unexplained deviates by 45 % of
    the spread of the times; below, it is as large as the differences that a plan evens out."""

    fit_window: int = 16
    """Steps whose measured times cost=fitted is fitted to."""

    loss: Literal["verl", "exact"] = "verl"
    """"verl": the trainer's own aggregation. "exact": what sits under the mask (NaN, infinity) and the width of a batch
    reach neither loss nor gradient; otherwise equal to rounding."""

    oversize: Literal["error", "alone"] = "error"
    """A row above the token cap: an error, or a micro-batch of its own."""

    min_row_tokens: int | None = None
    """Tokens of a padding row; None for the least that the engine takes (2 with FSDP, verl's 128 elsewhere)."""

    seed: int = 0
    """Seed for composition=stratified."""

    record: str | None = None
    """Append one JSON line per step, with lengths and plan, to this file."""

    check_patch_points: bool = True
    """False: attach to a verl whose patched functions differ from those that were tested. At your own risk."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Where requests are decoded; off by default."""

    def __post_init__(self) -> None:
        _check_kinds(self, "equipoise")
        for name in ("cost_linear", "cost_quadratic"):
            _require(_is_number(getattr(self, name)), self, name, "be a number of at least 0")
        free = self.cost == "transformer" and self.cost_linear == 0 and self.cost_quadratic == 0
        _require(not free, self, "cost_linear", "be above 0 when cost_quadratic is 0: a row must cost something")
        _require(_is_number(self.fit_min_r2) and self.fit_min_r2 <= 1, self, "fit_min_r2", "be from 0 to 1")
        _require(is_whole(self.fit_window, 1), self, "fit_window", "be a whole number of at least 1")
        for name, value, instead in (("cost", "fitted", "model"), ("loss", "exact", "verl")):
            if self.planner == "verl" and getattr(self, name) == value:
                remedy = f"use {name}={instead}, or planner=equipoise"
                raise InvalidConfig(must(f"equipoise.{name}", f"not be {value} with planner=verl", value, remedy))
        tokens = self.min_row_tokens
        rule = "be null (the least that the engine takes) or at least 2 (a prompt token and a response token)"
        _require(tokens is None or is_whole(tokens, 2), self, "min_row_tokens", rule)
        _require(is_whole(self.seed), self, "seed", "be a whole number of at least 0")
        record: Any = self.record
        _require(record is None or isinstance(record, str), self, "record", "be null or a file's path")

    @classmethod
    def from_node(cls, node: Any) -> EquipoiseConfig:
        """Check a configuration node, a mapping of plain values.

        Raises:
            InvalidConfig: the node is no mapping, has an unknown key, or a value breaks its rule.

        >>> EquipoiseConfig.from_node({"algorithm": "kk"}).algorithm
        'kk'
        """
        if isinstance(node, str):
            raise InvalidConfig(
                must(
                    "equipoise",
                    "be a configuration node",
                    node,
                    "Hydra did not find the group: install the package (`equipoise doctor` tells what is missing) or"
                    " add 'hydra.searchpath=[pkg://equipoise.conf]'",
                )
            )
        if not isinstance(node, Mapping):
            raise InvalidConfig(
                must("equipoise", "be a configuration node", node, "write +equipoise=default on the command line")
            )
        values = _known_values(cls, node, "equipoise")
        rollout = values.get("rollout", {})
        if not isinstance(rollout, Mapping):
            remedy = "write equipoise.rollout.enable=true"
            raise InvalidConfig(must("equipoise.rollout", "be a configuration node", rollout, remedy))
        values["rollout"] = RolloutConfig(**_known_values(RolloutConfig, rollout, "equipoise.rollout"))
        return cls(**values)


def _known_values(cls: type[Any], node: Any, where: str) -> dict[str, Any]:
    """The node as keyword arguments of the dataclass; an unknown key is an error."""
    values = {str(key): value for key, value in cast("Mapping[Any, Any]", node).items()}
    known = [each.name for each in fields(cls)]
    for key, value in values.items():
        if key not in known:
            raise InvalidConfig(must(f"{where}.{key}", "be a known key", value, nearest(key, known)))
    return values


def _check_kinds(config: EquipoiseConfig | RolloutConfig, where: str) -> None:
    """Names are among their options, and switches are true or false."""
    hints = get_type_hints(type(config))
    for each in fields(config):
        value, hint = getattr(config, each.name), hints[each.name]
        options = get_args(hint)
        if options and isinstance(options[0], str) and value not in options:
            rule = f"be one of {list(options)}"
            raise InvalidConfig(must(f"{where}.{each.name}", rule, value, nearest(str(value), options)))
        _require(hint is not bool or isinstance(value, bool), config, each.name, "be true or false")


def _require(good: bool, config: EquipoiseConfig | RolloutConfig, name: str, rule: str) -> None:
    """Raise unless the value of a field is good; the remedy is the field's default."""
    if good:
        return
    where = "equipoise.rollout" if isinstance(config, RolloutConfig) else "equipoise"
    (found,) = [each for each in fields(config) if each.name == name]
    default: Any = found.default if found.default_factory is MISSING else found.default_factory()
    remedy = f"fix the override; the default is {'null' if default is None else default}"
    raise InvalidConfig(must(f"{where}.{name}", rule, getattr(config, name), remedy))


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and is_amount(value)
