"""Every place where verl 0.9.1 assumes an accelerator, and its replacement.

Each shim runs right after the verl module it changes has been imported, and only if this package provides the platform
``cpu``. They are never undone: a process of a CPU job has no other use for verl. If a shim does not find what it
replaces, the import of that module raises :class:`~equipoise.errors.PatchMismatch`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# verl and transformers ship no types for what is replaced here.

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from equipoise.errors import PatchMismatch
from equipoise.trainer_hooks._imports import when_imported

ROLLOUT_NAME = "hf_cpu"
POLL_INTERVAL_S = 0.1
STREAM_KEY = "equipoise_stream"

_ROOM = __package__


def attach() -> None:
    """Run each shim when its module is imported."""
    for name, shim in _SHIMS.items():
        when_imported(name, shim)


def _found(owner: Any, name: str) -> Any:
    """Attribute ``name`` of a verl module or class that a shim replaces."""
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", repr(owner))
        raise PatchMismatch(
            f"{where} must have {name}, which a CPU run replaces; install verl==0.9.1 or unset VERL_PLATFORM"
        ) from None


def _process_group(module: ModuleType) -> None:
    """verl/utils/distributed.py:89 asks for ``cpu:gloo,{device}:{backend}``; torch rejects a second ``cpu``.

    Can go when verl omits the second half on ``cpu``.
    """
    build = _found(module, "initialize_global_process_group_ray")
    module.initialize_global_process_group_ray = functools.partial(build, backend="cpu:gloo")  # type: ignore[attr-defined]


def _engines(module: ModuleType) -> None:
    """verl/workers/engine/fsdp/transformer_impl.py:1143,1594 register FSDP for ``cuda`` and ``npu`` only.

    Only FSDP2 is registered for ``cpu``: FSDP1 cannot broadcast CPU parameters, so verl still rejects its name. Can go
    when verl registers ``cpu``.
    """
    engines = _found(_found(module, "EngineRegistry"), "_engines")
    for model_type in ("language_model", "value_model"):
        by_device = engines[model_type]["fsdp2"]
        by_device.setdefault("cpu", by_device["cuda"])
    _unpinned_offload(sys.modules["verl.workers.engine.fsdp.transformer_impl"])


def _unpinned_offload(module: ModuleType) -> None:
    """transformer_impl.py:462 offloads the reference model to *pinned* memory, which only an accelerator has.

    Can go when verl asks the platform whether memory can be pinned.
    """
    policy: Callable[..., object] = _found(module, "CPUOffloadPolicy")

    def unpinned(pin_memory: bool = True) -> object:
        return policy(pin_memory=False)

    module.CPUOffloadPolicy = unpinned  # type: ignore[attr-defined]


def _value_head(module: ModuleType) -> None:
    """verl/utils/model.py:641 loads a critic with flash attention even if its configuration says otherwise.

    Can go when verl passes ``model_config._attn_implementation`` on.
    """
    _found(module, "load_valuehead_model")

    def load_valuehead_model(local_path: str, torch_dtype: object, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load_valuehead_model  # type: ignore[attr-defined]


def _replay_buffer(module: ModuleType) -> None:
    """verl/trainer/ppo/v1/replay_buffer.py:144 polls every 2 s, longer than a step of a tiny model takes.

    Can go when ``poll_interval`` is configurable. This shim also fixes the order of a batch: line 350 lists
    trajectories in the order they finished, which differs between runs; here prompts are in data order and siblings in
    session order, so equal samples make an equal batch.
    """
    buffer = _found(module, "ReplayBuffer")
    init = _found(buffer, "__init__")
    materialize = _found(buffer, "_materialize_batch")

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        kwargs.setdefault("poll_interval", POLL_INTERVAL_S)
        init(self, *args, **kwargs)

    @functools.wraps(materialize)
    def _materialize_batch(self: Any, partition_id: str, uids: list[str], snapshot: dict[str, Any]) -> Any:
        place = {uid: i for i, uid in enumerate(self.prompt_global_steps[partition_id])}

        def order(key: str) -> tuple[int, list[int]]:
            uid, *rest = key.split("_")
            return place.get(uid, len(place)), [int(part) if part.isdigit() else 0 for part in rest]

        return materialize(self, partition_id, uids, {key: snapshot[key] for key in sorted(snapshot, key=order)})

    buffer.__init__ = __init__
    buffer._materialize_batch = _materialize_batch


def _agent_loop(module: ModuleType) -> None:
    """verl/experimental/agent_loop/agent_loop.py:660 gives a server only a random name for a sample.

    Our server seeds each sample by (step, row of the data, sibling), so these travel with the sampling parameters; so
    does the number of tokens sampled elsewhere, which the hook's clients keep up to date. Can go when verl passes a
    seed per sample.
    """
    from equipoise.trainer_hooks.on_verl.router.protocol import GENERATED_KEY

    worker = _found(module, "AgentLoopWorker")
    run = _found(worker, "_run_agent_loop")

    @functools.wraps(run)
    async def _run_agent_loop(self: Any, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any):
        if self.config.actor_rollout_ref.rollout.name == ROLLOUT_NAME:
            names = (
                trajectory["validate"],
                trajectory["step"],
                trajectory["sample_index"],
                kwargs.get("session_id", trajectory["rollout_n"]),
            )
            stream = "/".join(str(getattr(x, "data", x)) for x in names)
            sampling_params = {**sampling_params, STREAM_KEY: stream, GENERATED_KEY: 0}
        return await run(self, sampling_params, trajectory, **kwargs)

    worker._run_agent_loop = _run_agent_loop


def _rollout_adapter(module: ModuleType) -> None:
    """verl/workers/rollout/base.py:88 lists the rollouts of a training worker, without a function to add one."""
    registry: dict[tuple[str, str], str] = _found(module, "_ROLLOUT_REGISTRY")
    registry[ROLLOUT_NAME, "async"] = f"{_ROOM}.rollout.HFCPUAdapter"


def _rollout_replica(module: ModuleType) -> None:
    """verl/workers/rollout/replica.py:312 lists the rollouts of the driver."""

    def load() -> type:
        from equipoise.trainer_hooks.verl_on_cpu.rollout import HFCPUReplica

        return HFCPUReplica

    _found(module, "RolloutReplicaRegistry").register(ROLLOUT_NAME, load)


def _attention(_module: ModuleType) -> None:
    """Register the attention function: models look it up by name when they are built."""
    from equipoise.trainer_hooks.verl_on_cpu.attention import register

    register()


_SHIMS: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.distributed": _process_group,
    "verl.workers.engine": _engines,
    "verl.utils.model": _value_head,
    "verl.trainer.ppo.v1.replay_buffer": _replay_buffer,
    "verl.experimental.agent_loop.agent_loop": _agent_loop,
    "verl.workers.rollout.base": _rollout_adapter,
    "verl.workers.rollout.replica": _rollout_replica,
    "transformers.modeling_utils": _attention,
}
