"""The settings of a router, as verl's router file or the trainer hook passes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from equipoise._checks import is_whole
from equipoise.config import RolloutConfig
from equipoise.errors import InvalidConfig, must, nearest


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """A router's settings: verl's own sizes, and the ``equipoise.rollout`` node."""

    response_length: int = 4096
    """Maximum tokens of a response; verl's ``rollout.response_length``."""

    max_num_seqs: int = 1024
    """Maximum requests that a replica decodes at once; verl's ``rollout.max_num_seqs``."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        for name in ("response_length", "max_num_seqs"):
            value = getattr(self, name)
            if not is_whole(value, 1):
                remedy = f"pass verl's rollout.{name}"
                raise InvalidConfig(must(f"{name} of the router", "be a whole number of at least 1", value, remedy))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RouterConfig:
        """Settings from one flat mapping.

        Raises:
            InvalidConfig: an unknown key, or a value that breaks its rule.

        >>> RouterConfig.of({"max_num_seqs": 8, "transfer": "none"}).rollout.transfer
        'none'
        """
        own, rollout = ({each.name for each in fields(kind)} for kind in (cls, RolloutConfig))
        own.discard("rollout")
        known = sorted(own | rollout)
        for key, value in values.items():
            if key not in known:
                raise InvalidConfig(must(f"{key} of the router", "be a known key", value, nearest(key, known)))
        mine = {key: value for key, value in values.items() if key in own}
        return cls(**mine, rollout=RolloutConfig(**{key: values[key] for key in values if key in rollout}))
