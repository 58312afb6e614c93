"""Both ends of verl's rollout ``hf_cpu``: on the driver, and in each training worker.

There is one server (:mod:`~equipoise.trainer_hooks.verl_on_cpu.server`) per training rank, with the whole model.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# verl and ray ship no types for what is subclassed and called here.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from equipoise.errors import InvalidConfig, must
from equipoise.trainer_hooks.verl_on_cpu.server import HFCPUServer, Weights


def server_name(rank: int) -> str:
    """Ray name of a training rank's server."""
    return f"equipoise_hf_cpu_server_{rank}"


def _refuse_sharding(config: Any) -> None:
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        size = getattr(config, name)
        if size != 1:
            raise InvalidConfig(must(f"rollout.{name}", "be 1", size, "hf_cpu keeps a whole model in each server"))


class HFCPUReplica(RolloutReplica):
    """The driver's view of a server: starts it and forwards verl's calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_sharding(self.config)

    async def launch_servers(self) -> None:
        """Start the server actor."""
        if self.rollout_mode != RolloutMode.HYBRID:
            raise InvalidConfig(must("rollout mode", "be hybrid", self.rollout_mode, "train and sample on one pool"))
        name = server_name(self.replica_rank)
        actor: Any = ray.remote(HFCPUServer).options(name=name, num_cpus=1, max_concurrency=self.max_concurrency)
        server = actor.remote(self.config, self.model_config)
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name


class HFCPUAdapter(BaseRollout):
    """The training worker's end: sends this rank's weights to this rank's server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        _refuse_sharding(self.config)
        self._bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20

    @property
    def _server(self) -> Any:
        return ray.get_actor(server_name(torch.distributed.get_rank()))

    async def resume(self, tags: list[str]) -> None:
        """Serve again once verl resumes the cache; the weights were never released."""
        if "kv_cache" in tags:
            await self._server.wake_up.remote()

    async def release(self) -> None:
        """Stop serving."""
        await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        peft_config: object = None,
        global_steps: int | None = None,
        **_kwargs: object,
    ) -> None:
        """Send all weights, in buckets. Every item is a collective, so every rank must iterate to the end."""
        if wire_format != "named_tensors":
            raise InvalidConfig(
                must("wire_format", "be 'named_tensors'", wire_format, "use the naive checkpoint engine")
            )
        if peft_config is not None:
            raise InvalidConfig(must("model.lora.merge", "be True", False, "hf_cpu takes whole weights"))
        bucket: Weights = {}
        size = 0
        for name, tensor in weights:
            array = tensor.detach().to(device="cpu", dtype=torch.float32).numpy()
            if bucket and size + array.nbytes > self._bucket_bytes:
                await self._server.update_weights.remote(bucket, last=False, global_steps=None)
                bucket, size = {}, 0
            bucket[name] = array
            size += array.nbytes
        await self._server.update_weights.remote(bucket, last=True, global_steps=global_steps)
