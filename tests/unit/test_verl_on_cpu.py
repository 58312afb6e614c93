"""verl on CPUs: when it attaches, its environment and settings."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from equipoise.errors import InvalidInput
from equipoise.trainer_hooks.on_verl.router.protocol import GENERATED_KEY
from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_environment, cpu_overrides
from equipoise.trainer_hooks.verl_on_cpu.request import read_request
from tests.unit.cpu_models import LIMITS


@pytest.mark.parametrize("asked", [None, "nvidia"])
def test_does_nothing_unless_asked_for(asked: str | None) -> None:
    code = (
        "import sys, equipoise.trainer_hooks.verl_on_cpu, wrapt.importer as hooks;"
        "names = [m for m in ('torch', 'verl', 'ray', 'transformers') if m in sys.modules];"
        "print(len(hooks._post_import_hooks), names)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    if asked:
        environment["VERL_PLATFORM"] = asked
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "0 []"


def test_waits_for_verl_when_asked_for() -> None:
    code = (
        "import sys, equipoise.trainer_hooks.verl_on_cpu, wrapt.importer as hooks;"
        "print(sorted(hooks._post_import_hooks), 'torch' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VERL_PLATFORM": " CPU "},
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.strip() == "['verl.plugin.platform'] False"


def test_parameters_of_verl_become_a_request() -> None:
    params = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "logprobs": True, "repetition_penalty": 1.1}
    found = read_request([3, 4], params, name="7", seed=1, limits=LIMITS, stream="x", stop_ids={9, 2})
    assert (found.id, found.prompt, found.output) == ("7", (3, 4), ())
    how = found.sampling
    assert (how.temperature, how.top_p, how.top_k, how.repetition_penalty) == (0.5, 0.9, 0, 1.1)
    assert (how.max_tokens, how.stop_token_ids) == (40, (2, 9))
    assert read_request([3] * 60, {}, name="", seed=1, limits=LIMITS, stream="x").sampling.max_tokens == 4
    assert read_request([3], {"max_tokens": 5}, name="", seed=1, limits=LIMITS, stream="x").sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([3], {"top_p": 2}, r"top_p .*got 2"),
        ([3], {"n": 2}, r"sampling_params .*\['n'\]"),
        ([3] * 64, {}, r"tokens of the prompt .*got 64"),
        ([3, 4], {GENERATED_KEY: 2}, r"equipoise_generated .*got 2"),
        ([], {}, r"prompt of request 'a'"),
    ],
)
def test_rejects_what_cannot_be_sampled(prompt: list[int], params: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        read_request(prompt, params, name="a", seed=0, limits=LIMITS, stream="")


def test_environment_keeps_what_is_set_and_drops_what_stops_ray() -> None:
    environment = cpu_environment({"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "nvidia"})
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_overrides_reject_zero_ranks() -> None:
    with pytest.raises(InvalidInput, match="num_ranks must be at least 1"):
        cpu_overrides(0)
