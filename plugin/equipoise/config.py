"""The structured configuration and the only place for defaults. ``conf/equipoise`` holds presets only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, cast, get_args, get_type_hints

from equipoise._checks import is_amount, is_whole
from equipoise.errors import InvalidConfig, must, nearest

TIERS = (64, 32, 16, 8, 4)
"""Default decode sizes."""

Planner = Literal["equipoise", "verl"]
Cost = Literal["transformer", "token", "model", "fitted"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The node ``equipoise.rollout``: where requests are decoded, and which ones move."""

    enable: bool = False
    """True: requests go to the replica with the fewest expected tokens, and unfinished ones move from crowded
    replicas to idle ones."""

    check_interval: int = 100
    """Decode steps between checks for moves."""

    tiers: list[int] = field(default_factory=lambda: list(TIERS))
    """Decode sizes in requests, descending. Requests move if the fullest replica then fits into a smaller one."""

    multi_graph: bool = True
    """False: one decode shape; moves are planned by request counts instead of step times."""

    transfer: Literal["none", "recompute", "kv"] = "recompute"
    """How a request moves: not at all, as tokens that the receiver prefills, or with its cache. "recompute" is the
    default because it works with every engine. "kv" needs engines that can export caches: those of
    :mod:`equipoise.rollout`, and in verl the servers of a CPU run."""

    min_gain: float = 0.0
    """The least predicted saving, in seconds, that justifies a move; applies once ``profile`` knows step times."""

    profile: bool = True
    """Measure the time of a decode step at each tier, and move requests only if that pays."""

    profile_interval: int = 4
    """Keep every n-th measurement."""

    max_prompts: int = 65536
    """How many prompts' response lengths, and how many idle conversations, are remembered; the least recently used are
    forgotten first."""

    def __post_init__(self) -> None:
        _check_kinds(self, "equipoise.rollout")
        for name in ("check_interval", "profile_interval", "max_prompts"):
            _require(is_whole(getattr(self, name), 1), self, name, "be a whole number of at least 1")
        _require(_is_number(self.min_gain), self, "min_gain", "be a number of seconds of at least 0")
        given: Any = self.tiers
        tiers = list(cast("list[Any]", given)) if isinstance(given, (list, tuple)) else []
        good = bool(tiers) and all(is_whole(tier, 1) for tier in tiers) and tiers == sorted(set(tiers), reverse=True)
        _require(good, self, "tiers", "be whole numbers of at least 1 in descending order")


@dataclass(frozen=True, kw_only=True)
class EquipoiseConfig:
    """The node ``equipoise`` of a trainer's configuration.

    Mini-batch sizes, token caps and sequence parallelism come from the trainer's own keys.
    """

    enable: bool = True
    """False: the trainer runs as if Equipoise were not installed."""

    planner: Planner = "equipoise"
    """"equipoise" plans each step. "verl" leaves verl's own balancing alone and only measures it."""

    algorithm: Literal["refined", "kk", "lpt"] = "refined"
    """How rows are divided: by a search, or by a plain rule."""

    objective: Literal["lockstep", "rank"] = "lockstep"
    """"lockstep": ranks synchronize at every micro-batch, as under FSDP. "rank": once per optimizer step."""

    composition: Literal["keep", "stratified", "sorted"] = "keep"
    """"keep": optimizer steps follow the trainer's batch order. "stratified": the same mix of lengths in each.
    "sorted": rows of similar length, the longest first; cheapest, but biased."""

    cost: Cost = "transformer"
    """"transformer": cost_linear · L + cost_quadratic · L². "token": the tokens. "model": FLOPs from the actor's
    configuration. "fitted": seconds, refitted after each step to measured micro-batch times; the same as "model"
    until there are enough of them, and whenever the fit is poor."""

    cost_linear: float = 24576.0
    """Cost of one token with cost=transformer; the default is verl's, for a hidden size of 4096 (in general 6 × hidden
    size)."""

    cost_quadratic: float = 1.0
    """Cost of one pair of tokens with cost=transformer."""

    fit_min_r2: float = 0.8
    """The least r² at which cost=fitted uses its fit. At 0.8, the residual is 45 % of the standard deviation of the
    times; below, it is as large as the differences that a plan balances."""

    fit_window: int = 16
    """How many of the last steps cost=fitted is fitted to."""

    loss: Literal["verl", "exact"] = "verl"
    """"verl": the trainer's own aggregation. "exact": neither masked values (NaN, infinity) nor the width of a batch
    reach loss or gradient; otherwise equal up to rounding."""

    oversize: Literal["error", "alone"] = "error"
    """Whether a row above the token cap is an error or its own micro-batch."""

    min_row_tokens: int | None = None
    """Tokens of a padding row; None for the minimum of the engine (2 with FSDP, verl's 128 elsewhere)."""

    seed: int = 0
    """Seed for composition=stratified."""

    record: str | None = None
    """Append one JSON line per step, with lengths and plan, to this file."""

    check_patch_points: bool = True
    """False: attach even if verl's patched functions differ from the tested ones. At your own risk."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Routing and moves of requests; off by default."""

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
            InvalidConfig: the node is not a mapping, has an unknown key, or a value breaks its rule.

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
    """Check that names are among their options, and that switches are true or false."""
    hints = get_type_hints(type(config))
    for each in fields(config):
        value, hint = getattr(config, each.name), hints[each.name]
        options = get_args(hint)
        if options and isinstance(options[0], str) and value not in options:
            rule = f"be one of {list(options)}"
            raise InvalidConfig(must(f"{where}.{each.name}", rule, value, nearest(str(value), options)))
        _require(hint is not bool or isinstance(value, bool), config, each.name, "be true or false")


def _require(good: bool, config: EquipoiseConfig | RolloutConfig, name: str, rule: str) -> None:
    """Raise unless the value of a field is valid; the remedy is the field's default."""
    if good:
        return
    where = "equipoise.rollout" if isinstance(config, RolloutConfig) else "equipoise"
    (found,) = [each for each in fields(config) if each.name == name]
    default: Any = found.default if found.default_factory is MISSING else found.default_factory()
    remedy = f"fix the override; the default is {'null' if default is None else default}"
    raise InvalidConfig(must(f"{where}.{name}", rule, getattr(config, name), remedy))


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and is_amount(value)
