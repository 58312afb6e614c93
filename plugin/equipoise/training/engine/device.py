"""The device of this process, its vendor, and the process group for it."""

# pyright: reportPrivateImportUsage=false
# torch.distributed lists HashStore nowhere.

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from equipoise.errors import InvalidInput, must

DEVICE_VARIABLE = "EQUIPOISE_DEVICE"
"""Environment variable that overrides the detected device: cpu, cuda, npu or any name with a registered engine."""
VENDOR_VARIABLE = "EQUIPOISE_VENDOR"
"""Environment variable that overrides the detected vendor: nvidia, amd, huawei or any name with an engine."""
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


def device_name() -> str:
    """``EQUIPOISE_DEVICE`` if set, else "cuda" or "npu" if available, else "cpu"."""
    asked = os.environ.get(DEVICE_VARIABLE)
    if asked:
        return asked
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def vendor_name(device: str) -> str | None:
    """``EQUIPOISE_VENDOR`` if set, else the vendor that torch was built for; None if there is none."""
    asked = os.environ.get(VENDOR_VARIABLE)
    if asked:
        return asked
    if device == "cuda":
        return "amd" if torch.version.hip else "nvidia"
    return "huawei" if device == "npu" else None


def local_device(name: str) -> torch.device:
    """The device of this process: among accelerators, number ``LOCAL_RANK``.

    Raises:
        InvalidInput: this machine does not have that device.
    """
    if name == "cpu":
        return torch.device("cpu")
    accelerator: Any = getattr(torch, name, None)
    if not (hasattr(accelerator, "is_available") and accelerator.is_available()):
        remedy = f"use device='cpu', unset {DEVICE_VARIABLE}, or install a torch that is built for it"
        raise InvalidInput(must("device", "be one that torch finds on this machine", name, remedy))
    number, count = int(os.environ.get("LOCAL_RANK", "0")), int(accelerator.device_count())
    if number >= count:
        remedy = "start a process for each, or set it to 0 where each process sees a device of its own"
        raise InvalidInput(must("LOCAL_RANK", f"be below {count}, the {name} devices seen", number, remedy))
    device = torch.device(name, number)
    accelerator.set_device(device)
    return device


def ensure_process_group(name: str) -> None:
    """Start torch.distributed if necessary, from torchrun's environment or for this process alone."""
    if dist.is_initialized():
        return
    backend = _BACKENDS.get(name)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
