"""The platform ``cpu`` of verl's registry, and its stand-in for the ``torch.cuda`` module."""

# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportMissingParameterType=false
# verl ships no types, so what is inherited from it is unknown.
# ruff: noqa: D102 - verl's base class documents the methods

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform import PlatformBase


class _CPUDevice(ModuleType):
    """The parts of ``torch.cuda`` that verl calls: memory is zero, streams are absent, ``torch.cpu`` does the rest."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def get_device_name(self, *_args: object) -> str:
        return "CPU"  # verl's FLOP counter looks up the peak by this name

    def memory_allocated(self, *_args: object) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_args: object) -> tuple[int, int]:
        return 0, 0

    def empty_cache(self, *_args: object) -> None:
        """No allocator caches memory here; nor is there a device to choose or to wait for."""

    set_device = synchronize = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = empty_cache

    def get_rng_state(self, *_args: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_args: object) -> None:
        torch.set_rng_state(state)


_DEVICE = _CPUDevice("equipoise_cpu_device")


class CPUPlatform(PlatformBase):
    """CPU tensors, gloo, and as many fake GPUs in Ray as the job has ranks."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "generic"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        # verl passes it on to `Tensor.to` and `fully_shard`, where an integer would mean `cuda:N`.
        return torch.device("cpu")  # type: ignore[return-value]

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:  # type: ignore[override]
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # verl sums this resource and requests one per rank; `ray.init(num_gpus=N)` fakes them

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
