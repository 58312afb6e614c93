"""What an engine needs to start: attributes of ``initialize``, the optimizer, equal weights on all ranks."""

# torch's distributed modules are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from equipoise.errors import must
from equipoise.training.engine import models
from equipoise.training.engine.base import WrongState
from equipoise.training.engine.config import OptimizerConfig


class FromInitialize:
    """An attribute that ``initialize`` sets; reading it earlier is an error."""

    def __get__(self, engine: object | None, owner: type) -> Any:
        if engine is None:
            return self
        remedy = "call initialize() first, on every rank"
        raise WrongState(must("engine", "be initialized before it is used", "one that is not", remedy))


def optimizer_of(config: OptimizerConfig, parameters: list[Any]) -> torch.optim.Optimizer:
    """The optimizer that the configuration names, at its first learning rate."""
    rate = config.lr_at(0)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, lr=rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


def same_everywhere(module: models.AnyModel, device: torch.device) -> models.AnyModel:
    """Send the weights and buffers of rank 0 to all ranks, tensor by tensor through ``device``."""
    if dist.get_world_size() > 1:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                there = tensor.to(device)
                dist.broadcast(there, src=0)
                tensor.copy_(there)
    return module
