"""Where a process group reduces."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def device_of(group: Any) -> torch.device:
    """Where tensors must be for a collective of ``group``: the CPU if it knows gloo, else this rank's accelerator."""
    if "gloo" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
