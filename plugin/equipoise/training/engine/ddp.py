"""Whole weights on every rank; gradients are averaged once, after the last micro-batch."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from equipoise.together import together
from equipoise.training.engine import models
from equipoise.training.engine.start import same_everywhere
from equipoise.training.engine.torch_engine import TorchEngine

_BUCKET_BYTES = 32 * 2**20


class DDPEngine(TorchEngine):
    """Data parallelism with whole weights.

    Gradients are reduced in flat buckets at the end of the pass. torch's ``DistributedDataParallel`` would keep its
    buckets on the device when weights are offloaded, and hang if ranks reach different parts of the graph.
    ``gradient_sync`` and ``reshard_after_forward`` only apply to fsdp2.
    """

    def _spread(self) -> Any:
        module = together(
            lambda: models.build(self.source, self.config).to(self._device),
            group=dist.group.WORLD,
            doing="building the model",
        )
        return same_everywhere(module, self._device)

    @property
    def _meets_in_forward(self) -> bool:
        return self.sp_group is not None

    def _before_micro_batch(self, *, last: bool) -> None:
        pass

    def _free_gathered(self, *, forward_only: bool) -> None:
        pass

    def _average_gradients(self) -> None:
        gradients: list[torch.Tensor] = []
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        if dist.get_world_size() == 1:
            return
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _autocast(self) -> Any:
        dtype = self.config.param_dtype
        mixed = dtype is not None and dtype != self.config.dtype
        return torch.autocast(self._device.type, dtype=models.DTYPES[dtype or self.config.dtype], enabled=mixed)


def _buckets(gradients: list[torch.Tensor]) -> Generator[list[torch.Tensor], None, None]:
    """Runs of neighbors of one dtype, up to the bucket's size or a single tensor."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
