"""Engines by name: the three steps of a look-up, what is refused, and what the settings must be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import equipoise.training.engine
from equipoise.errors import DuplicateName, InvalidInput, UnknownName
from equipoise.training.engine import BaseEngine, EngineConfig, EngineRegistry, MissingPackage, OptimizerConfig, engines
from equipoise.training.engine.base import PassOptions, WrongState
from equipoise.training.engine.device import local_device, vendor_name


def made(name: str) -> Any:
    return type(name, (BaseEngine,), {})


ANY, AMD, NVIDIA, HOST = made("Any"), made("Amd"), made("Nvidia"), made("Host")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.delenv("EQUIPOISE_DEVICE", raising=False)
    monkeypatch.delenv("EQUIPOISE_VENDOR", raising=False)


@pytest.fixture
def registry() -> EngineRegistry:
    table = EngineRegistry()
    table.register(ANY, model_type=["language_model", "value_model"], backend="whole", device=["cpu", "cuda"])
    table.register(AMD, model_type="language_model", backend="whole", device="cuda", vendor="amd")
    table.register(NVIDIA, model_type="language_model", backend="sharded", device="cuda", vendor=["nvidia", "other"])
    table.register(HOST, model_type="language_model", backend="sharded", device="cpu")
    return table


@pytest.mark.parametrize(
    ("backend", "device", "vendor", "want"),
    [
        ("whole", "cuda", "amd", AMD),  # exactly
        ("whole", "cuda", "nvidia", ANY),  # the device, whatever the vendor
        ("whole", "cpu", None, ANY),
        ("sharded", "cuda", "amd", NVIDIA),  # another vendor's GPU speaks CUDA
        ("sharded", "cuda", "other", NVIDIA),
        ("sharded", "cpu", "arm", HOST),
    ],
)
def test_looks_up_in_three_steps(
    registry: EngineRegistry, backend: str, device: str, vendor: str | None, want: Any
) -> None:
    assert registry.find("language_model", backend, device=device, vendor=vendor) is want


def test_the_environment_overrides_what_is_found(registry: EngineRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_DEVICE", "cuda")
    monkeypatch.setenv("EQUIPOISE_VENDOR", "amd")
    assert registry.find("language_model", "whole") is AMD
    monkeypatch.setenv("EQUIPOISE_VENDOR", "nvidia")
    assert registry.find("language_model", "whole") is ANY
    assert registry.find("language_model", "sharded", device="cpu") is HOST


@pytest.mark.parametrize(
    ("device", "hip", "vendor"),
    [("cuda", None, "nvidia"), ("cuda", "6.2", "amd"), ("npu", None, "huawei"), ("cpu", None, None)],
)
def test_a_vendor_is_the_one_that_torch_was_built_for(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, vendor: str | None
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert vendor_name(device) == vendor


def test_an_unknown_name_lists_what_there_is(registry: EngineRegistry) -> None:
    with pytest.raises(UnknownName, match=r"model_type.*\[language_model, value_model\].*got 'reward'"):
        registry.find("reward", "whole")
    with pytest.raises(UnknownName, match=r"must be one of \[sharded, whole\], got 'wholly'; did you mean 'whole'\?"):
        registry.find("language_model", "wholly")
    with pytest.raises(UnknownName, match=r"\(there are: cpu of any vendor, cuda of nvidia, cuda of other\)"):
        registry.find("language_model", "sharded", device="npu")


def test_a_duplicate_is_refused_and_adds_nothing(registry: EngineRegistry) -> None:
    before = registry.entries()
    with pytest.raises(DuplicateName, match=r"'sharded', 'cpu', None"):
        registry.register(ANY, model_type=["value_model", "language_model"], backend="sharded", device=["npu", "cpu"])
    assert registry.entries() == before


@pytest.mark.parametrize("engine", ["equipoise.training.engine.ddp", int])
def test_only_engines_are_registered(registry: EngineRegistry, engine: Any) -> None:
    with pytest.raises(InvalidInput, match="must be a"):
        registry.register(engine, model_type="language_model", backend="mine", device="cpu")


def test_names_must_be_names(registry: EngineRegistry) -> None:
    names: list[Any] = [[], "", [3]]
    for wrong in names:
        with pytest.raises(InvalidInput, match="device"):
            registry.register(ANY, model_type="language_model", backend="mine", device=wrong)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = EngineRegistry()
    table.register(
        "needs_more:Engine", model_type="language_model", backend="mine", device="cpu", extra="equipoise[mine]"
    )
    with pytest.raises(MissingPackage, match=r"no a_package_that_nobody_has.*; pip install 'equipoise\[mine\]'"):
        table.find("language_model", "mine", device="cpu")


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        ("json:Engine", UnknownName, "be a class of json"),
        ("json:JSONDecoder", InvalidInput, "be a subclass of BaseEngine"),
    ],
)
def test_a_registered_string_must_lead_to_an_engine(target: str, error: type[Exception], text: str) -> None:
    table = EngineRegistry()
    table.register(target, model_type="language_model", backend="mine", device="cpu")
    with pytest.raises(error, match=text):
        table.find("language_model", "mine", device="cpu")


def test_the_packages_own_engines_are_listed_before_they_are_imported() -> None:
    code = (
        "import json, sys; from equipoise.training.engine import engines; rows = engines.entries();"
        "print(json.dumps([len(rows), 'transformers' in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert json.loads(run.stdout) == [12, False]
    for kind in ("language_model", "value_model"):
        assert engines.find(kind, "ddp", device="cuda", vendor="amd").__name__ == "DDPEngine"
        assert engines.find(kind, "fsdp2", device="cpu").__name__ == "FSDP2Engine"


def test_a_class_is_registered_by_decorator() -> None:
    table = EngineRegistry()

    @table.decorator(model_type="language_model", backend="mine", device="cpu")
    class Mine(BaseEngine):
        pass

    assert table.find("language_model", "mine", device="cpu") is Mine


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_token_len_per_gpu": 0}, "max_token_len_per_gpu must be a whole number of at least 1, got 0"),
        ({"max_token_len_per_gpu": 8, "micro_batch_size_per_gpu": 2}, "micro_batch_size_per_gpu must be None when"),
        ({"micro_batch_size_per_gpu": 3, "force_group_size": 2}, "per_gpu must be a multiple of force_group_size = 2"),
        ({"log_prob_chunk_tokens": 0}, "log_prob_chunk_tokens must be a whole number of at least 1, got 0"),
        ({"sp_size": 0}, "sp_size must be"),
        ({"dtype": "float16"}, r"dtype must be one of \['float64', 'float32', 'bfloat16'\], got 'float16'"),
        ({"gradient_sync": "lats"}, "did you mean 'last'"),
        ({"on_shortage": "pad"}, "on_shortage must be one of"),
    ],
)
def test_settings_that_break_a_rule_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_token_len_per_gpu": 0}, "max_token_len_per_gpu must be a whole number of at least 1, got 0"),
        ({"max_token_len_per_gpu": 8, "micro_batch_size_per_gpu": 2}, "micro_batch_size_per_gpu must be None when"),
    ],
)
def test_settings_of_one_pass_keep_the_rules_of_the_engines_own(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        PassOptions(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_a_device_that_is_not_there_is_one_error_before_any_process_group(backend: str) -> None:
    engine = engines.create(EngineConfig(backend=backend, device="cuda"), "no model")
    with pytest.raises(InvalidInput, match=r"device.*got 'cuda'"):
        engine.initialize()
    assert not torch.distributed.is_initialized()
    with pytest.raises(InvalidInput, match="got 'npu'"):
        local_device("npu")


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InvalidInput, match=r"LOCAL_RANK.*\b2\b.*got 2"):
        local_device("cuda")


USES: dict[str, Callable[[Any], Any]] = {
    "train_mode": lambda engine: engine.train_mode().__enter__(),
    "eval_mode": lambda engine: engine.eval_mode().__enter__(),
    "pass": lambda engine: engine.forward_backward_batch(
        TensorDict({}, batch_size=[0]), None, forward_only=True, max_token_len_per_gpu=8
    ),
    "size": lambda engine: engine.get_data_parallel_size(),
    "rank": lambda engine: engine.get_data_parallel_rank(),
    "group": lambda engine: engine.get_data_parallel_group(),
    "reports": lambda engine: engine.is_mp_src_rank_with_outputs(),
    "weights": lambda engine: next(engine.get_per_tensor_param()),
    "to": lambda engine: engine.to("cpu"),
    "zero_grad": lambda engine: engine.optimizer_zero_grad(),
    "step": lambda engine: engine.optimizer_step(),
    "lr": lambda engine: engine.lr_scheduler_step(),
    "save": lambda engine: engine.save_checkpoint("nowhere"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_an_engine_that_is_not_initialized_says_so(backend: str, use: str) -> None:
    engine = engines.create(EngineConfig(backend=backend, device="cpu"), "no model")
    with pytest.raises(WrongState, match=r"initialize"):
        USES[use](engine)
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "adam"}, "did you mean 'adamw'"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"max_grad_norm": 0.0}, "use None for no clipping"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"schedule": "cosine"}, "total_steps must be above warmup_steps = 0 with schedule 'cosine', got None"),
    ],
)
def test_an_optimizer_that_breaks_a_rule_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        OptimizerConfig(**settings)


def test_a_cosine_ends_at_its_share() -> None:
    rates = OptimizerConfig(lr=2.0, schedule="cosine", total_steps=4, min_lr_ratio=0.1)
    assert [round(rates.lr_at(step), 6) for step in (0, 2, 4, 9)] == [2.0, 1.1, 0.2, 0.2]


def test_every_exported_name_is_there() -> None:
    for name in equipoise.training.engine.__all__:
        assert getattr(equipoise.training.engine, name) is not None
