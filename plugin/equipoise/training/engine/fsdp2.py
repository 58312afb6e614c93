"""Weights, gradients and optimizer states sharded over all ranks, block by block (``torch.distributed.fsdp``).

J. Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023 (arXiv 2304.11277).
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from equipoise.together import together
from equipoise.training.engine import models
from equipoise.training.engine.start import same_everywhere
from equipoise.training.engine.torch_engine import TorchEngine


class FSDP2Engine(TorchEngine):
    """Fully sharded data parallelism; weights are also sharded over ranks that share rows (``sp_size``)."""

    def _spread(self) -> Any:
        first = dist.get_rank() == 0
        # Only rank 0 reads the weights; it sends the others their shards, and buffers that checkpoints lack.
        module, bare = together(lambda: self._built(first), group=dist.group.WORLD, doing="building the model")
        if not bare:
            return self._sharded(same_everywhere(module, self._device))
        whole = module.state_dict() if first else {}
        module = self._sharded(module)
        if not first:
            module.to_empty(device=self._device)
        set_model_state_dict(module, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
        return module

    def _built(self, first: bool) -> tuple[models.AnyModel, bool]:
        """The module, and whether ranks other than 0 lack its weights."""
        bare = dist.get_world_size() > 1 and models.may_be_bare(self.source)
        make = models.bare if bare and not first else models.build
        return make(self.source, self.config), bare

    @property
    def _meets_in_forward(self) -> bool:
        return dist.get_world_size() > 1

    def _sharded(self, module: Any) -> Any:
        dtypes = models.DTYPES
        policy = MixedPrecisionPolicy(
            param_dtype=dtypes[self.config.param_dtype or self.config.dtype],
            reduce_dtype=dtypes[self.config.reduce_dtype or self.config.dtype],
        )
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        for block in models.blocks(module):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.config.reshard_after_forward)
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    def _before_micro_batch(self, *, last: bool) -> None:
        self.module.set_requires_gradient_sync(last or self.config.gradient_sync == "each")
        self.module.set_is_last_backward(last)

    def _free_gathered(self, *, forward_only: bool) -> None:
        if forward_only:  # without a backward, the outermost weights are still gathered
            self.module.reshard()

    def _average_gradients(self) -> None:
        pass
