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
    for key, value in asdict(eq.EquipoiseConfig()).items():
        text = "null" if value is None else str(value).lower()
        assert compose("+equipoise=default", f"equipoise.{key}={text}")["equipoise"][key] == value


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
        ("default", ["equipoise must be a configuration node", "'default'", "Hydra did not find the group"]),
        ([1], ["equipoise must be a configuration node", "[1]"]),
    ],
)
def test_n2_bad_nodes_are_refused_in_words(node: Any, words: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        eq.EquipoiseConfig.from_node(node)
    for word in words:
        assert word in str(caught.value)
