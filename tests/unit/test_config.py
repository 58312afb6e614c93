"""The configuration: presets, defaults and refusals."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

import equipoise as eq
from equipoise.errors import InvalidConfig

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "equipoise").glob("*.yaml"))


def compose(*overrides: str) -> Any:
    """What an application of any kind gets from the group."""
    with hydra.initialize_config_module("tests.unit.hydra_app", version_base=None):
        node = hydra.compose("app", overrides=list(overrides))
    return OmegaConf.to_container(node, resolve=True)


def test_the_default_preset_is_the_dataclass() -> None:
    assert compose("+equipoise=default")["equipoise"] == asdict(eq.EquipoiseConfig())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_and_is_legal(preset: str) -> None:
    config = eq.EquipoiseConfig.from_node(compose(f"+equipoise={preset}")["equipoise"])
    assert config.enable == (preset != "off")


def test_there_are_the_promised_presets() -> None:
    assert PRESETS == ["areal", "default", "long_context", "mindspeed", "off", "verl"]


def test_any_field_can_be_overridden_without_a_plus() -> None:
    defaults = asdict(eq.EquipoiseConfig())
    rollout = defaults.pop("rollout")
    for key, value in [*defaults.items(), *((f"rollout.{key}", value) for key, value in rollout.items())]:
        text = "null" if value is None else str(value).lower()
        node = compose("+equipoise=default", f"equipoise.{key}={text}")["equipoise"]
        assert (node["rollout"] if key.startswith("rollout.") else node)[key.removeprefix("rollout.")] == value


def test_the_rollout_node_is_read_in_part_or_whole() -> None:
    part = eq.EquipoiseConfig.from_node({"rollout": {"enable": True, "tiers": [8, 2]}})
    assert (part.rollout.enable, part.rollout.tiers, part.rollout.check_interval) == (True, [8, 2], 100)
    assert not eq.EquipoiseConfig.from_node({}).rollout.enable


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"algoritm": "kk"}, ["equipoise.algoritm must be a known key", "'kk'", "did you mean 'algorithm'"]),
        ({"algorithm": "kkk"}, ["equipoise.algorithm must be one of", "'kkk'", "did you mean 'kk'"]),
        ({"enable": "yes"}, ["equipoise.enable must be true or false", "'yes'"]),
        ({"cost_linear": -1.0}, ["equipoise.cost_linear must be a number of at least 0", "-1.0"]),
        ({"cost_linear": float("nan")}, ["equipoise.cost_linear", "nan"]),
        ({"cost_linear": 0, "cost_quadratic": 0}, ["equipoise.cost_linear must be above 0"]),
        ({"min_row_tokens": 1}, ["equipoise.min_row_tokens must be null or at least 2", "got 1"]),
        ({"seed": -1}, ["equipoise.seed", "-1"]),
        ({"record": 3}, ["equipoise.record", "3"]),
        ({"rollout": {"check_intervall": 3}}, ["equipoise.rollout.check_intervall", "did you mean 'check_interval'"]),
        ({"rollout": {"enable": 1}}, ["equipoise.rollout.enable must be true or false", "got 1"]),
        ({"rollout": {"transfer": "copy"}}, ["equipoise.rollout.transfer must be one of", "'recompute'", "'copy'"]),
        ({"rollout": {"tiers": [4, 8]}}, ["equipoise.rollout.tiers", "fall", "[4, 8]"]),
        ({"rollout": {"tiers": []}}, ["equipoise.rollout.tiers", "got []"]),
        ({"rollout": {"tiers": 8}}, ["equipoise.rollout.tiers", "got 8"]),
        ({"rollout": {"check_interval": 0}}, ["equipoise.rollout.check_interval", "at least 1", "got 0"]),
        ({"rollout": {"profile_interval": 2.5}}, ["equipoise.rollout.profile_interval", "whole number", "2.5"]),
        ({"rollout": {"min_gain": -1}}, ["equipoise.rollout.min_gain must be a number of at least 0", "got -1"]),
        ({"rollout": True}, ["equipoise.rollout must be a configuration node", "equipoise.rollout.enable=true"]),
        ("default", ["equipoise must be a configuration node", "'default'", "Hydra did not find the group"]),
        ([1], ["equipoise must be a configuration node", "[1]"]),
    ],
)
def test_n2_bad_nodes_are_refused_in_words(node: Any, words: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        eq.EquipoiseConfig.from_node(node)
    for word in words:
        assert word in str(caught.value)
