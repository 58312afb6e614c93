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
        ({"algoritm": "kk"}, ["equipoise.algoritm", "'kk'", "'algorithm'"]),
        ({"algorithm": "kkk"}, ["equipoise.algorithm", "'kkk'", "'kk'"]),
        ({"loss": "exakt"}, ["equipoise.loss", "'exakt'", "'exact'"]),
        ({"loss": "exact", "planner": "verl"}, ["equipoise.loss", "exact", "planner=verl"]),
        ({"cost": "fitted", "planner": "verl"}, ["equipoise.cost", "fitted", "planner=verl"]),
        ({"enable": "yes"}, ["equipoise.enable", "'yes'"]),
        ({"cost_linear": -1.0}, ["equipoise.cost_linear", "-1.0", "24576.0"]),
        ({"cost_linear": float("nan")}, ["equipoise.cost_linear", "nan"]),
        ({"cost_quadratic": True}, ["equipoise.cost_quadratic", "True"]),
        ({"cost_linear": 0, "cost_quadratic": 0}, ["equipoise.cost_linear", "cost_quadratic", "got 0"]),
        ({"fit_min_r2": 1.5}, ["equipoise.fit_min_r2", "1.5", "0.8"]),
        ({"fit_min_r2": float("nan")}, ["equipoise.fit_min_r2", "nan"]),
        ({"fit_min_r2": "high"}, ["equipoise.fit_min_r2", "'high'"]),
        ({"fit_window": 0}, ["equipoise.fit_window", "got 0", "16"]),
        ({"min_row_tokens": 1}, ["equipoise.min_row_tokens", "got 1", "null"]),
        ({"seed": -1}, ["equipoise.seed", "-1"]),
        ({"record": 3}, ["equipoise.record", "3"]),
        ({"rollout": {"check_intervall": 3}}, ["equipoise.rollout.check_intervall", "'check_interval'"]),
        ({"rollout": {"enable": 1}}, ["equipoise.rollout.enable", "got 1"]),
        ({"rollout": {"transfer": "copy"}}, ["equipoise.rollout.transfer", "'recompute'", "'copy'"]),
        ({"rollout": {"tiers": [4, 8]}}, ["equipoise.rollout.tiers", "[4, 8]", "[64, 32, 16, 8, 4]"]),
        ({"rollout": {"tiers": [4, 4]}}, ["equipoise.rollout.tiers", "[4, 4]"]),
        ({"rollout": {"tiers": []}}, ["equipoise.rollout.tiers", "got []"]),
        ({"rollout": {"tiers": 8}}, ["equipoise.rollout.tiers", "got 8"]),
        ({"rollout": {"check_interval": 0}}, ["equipoise.rollout.check_interval", "got 0", "100"]),
        ({"rollout": {"profile_interval": 2.5}}, ["equipoise.rollout.profile_interval", "2.5"]),
        ({"rollout": {"max_prompts": 0}}, ["equipoise.rollout.max_prompts", "got 0"]),
        ({"rollout": {"min_gain": -1}}, ["equipoise.rollout.min_gain", "got -1"]),
        ({"rollout": True}, ["equipoise.rollout", "True", "equipoise.rollout.enable=true"]),
        ("default", ["equipoise", "'default'", "equipoise doctor"]),
        ([1], ["equipoise", "[1]"]),
    ],
)
def test_bad_nodes_are_refused_with_field_and_value(node: Any, words: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        eq.EquipoiseConfig.from_node(node)
    for word in words:
        assert word in str(caught.value)
