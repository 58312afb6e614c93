"""The environment and settings for training with verl on CPUs; model, data and algorithm are up to you."""

from __future__ import annotations

import os
from collections.abc import Mapping

from equipoise.errors import InvalidInput, must

ENVIRONMENT: Mapping[str, str] = {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # a rank is a process, and there are rarely more cores than ranks
    "RAY_DEDUP_LOGS": "0",
    # Ray gives up on its own daemons and workers if a busy machine starts them slowly
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_py_gcs_connect_timeout_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than a short run
    "TQ_NUM_THREADS": "2",
}

_NOT_INHERITED = (
    "CUDA_VISIBLE_DEVICES",  # Ray does not fake GPUs if this is the empty string
    "RAY_ADDRESS",
)


def cpu_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a CPU job: ``base`` (None: this process's), plus the CPU settings it does not set."""
    given = {
        name: value for name, value in (os.environ if base is None else base).items() if name not in _NOT_INHERITED
    }
    return {**ENVIRONMENT, **given, "VERL_PLATFORM": "cpu"}


def cpu_overrides(num_ranks: int, *, attention: str = "equipoise_varlen_cpu", critic: bool = False) -> list[str]:
    """Return Hydra overrides for ``python -m verl.trainer.main_ppo`` on ``num_ranks`` CPU processes.

    Args:
        num_ranks: data-parallel ranks, each a training process and a rollout server.
        attention: attention function of transformers for the actor, the reference and the critic.
        critic: also set what a critic needs.

    >>> [line for line in cpu_overrides(2) if "strategy" in line]
    ['actor_rollout_ref.actor.strategy=fsdp2']
    """
    if num_ranks < 1:
        raise InvalidInput(must("num_ranks", "be at least 1", num_ranks, "pass the number of data-parallel ranks"))
    models = ["actor_rollout_ref", *(["critic"] if critic else [])]
    engines = ["actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"]
    if critic:
        engines.append("critic.fsdp")
    return [
        "actor_rollout_ref.actor.strategy=fsdp2",
        *(["critic.strategy=fsdp2"] if critic else []),
        *(f"++{model}.model.override_config.attn_implementation={attention}" for model in models),
        *(f"{model}.model.enable_gradient_checkpointing=False" for model in models),
        *(f"++{engine}.model_dtype=fp32" for engine in engines),
        *(f"++{engine}.use_torch_compile=False" for engine in engines),
        *(f"++{engine}.mixed_precision.{kind}_dtype=fp32" for engine in engines for kind in ("param", "reduce")),
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.rollout.name=hf_cpu",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "data.dataloader_num_workers=0",
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={num_ranks}",
        # Ray reserves one CPU for every actor, whatever it does; with too few verl would wait forever.
        f"ray_kwargs.ray_init.num_cpus={24 + 4 * num_ranks}",
        f"++ray_kwargs.ray_init.num_gpus={num_ranks}",
        "++ray_kwargs.ray_init.include_dashboard=False",
    ]
