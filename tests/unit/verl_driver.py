"""verl's real ``PPOTrainer`` with its real configuration, without processes: what the hook does on the driver.

Worker groups only say how they dispatch and keep what they are sent. :class:`MemoryQueue` stands in for TransferQueue,
which takes 20 s to start; ``tests/integration/driver_rig.py`` has the real one.
"""

# verl is not typed; the tests check what comes from it.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import functools
import uuid
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(6, 300, 30)]
BASE = (
    "+equipoise=default",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=hf_cpu",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "critic.strategy=fsdp2",
    "critic.enable=False",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=600",
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)


class Groups:
    """A worker group as the driver sees it: a dispatch mapping, and calls that keep what they were sent."""

    def __init__(self, **meshes: int) -> None:
        self._dispatch_info = {mesh: list(range(dp)) for mesh, dp in meshes.items()}
        self.sent: list[dict[str, Any]] = []

    def _keep(self, batch: Any) -> None:
        wire = batch.extra_info.get("equipoise_plan")
        self.sent.append(
            {
                "keys": list(batch.keys),
                "wire": None if wire is None else describe(wire),
                "exact": batch.extra_info.get("equipoise_exact_loss", False),
            }
        )

    def update_actor(self, batch: Any) -> Any:
        self._keep(batch)
        return {"metrics": {"mfu": [0.5], "loss": [0.0]}}

    def train_mini_batch(self, batch: Any) -> Any:
        self._keep(batch)
        return SimpleNamespace(get=lambda: {"metrics": {"mfu": [0.5], "loss": [0.0]}})


class TimedGroups(Groups):
    """Workers whose micro-batches take a known time, that of the slowest rank; ``silent`` ones run verl's own."""

    silent = False

    def update_actor(self, batch: Any) -> Any:
        from equipoise.trainer_hooks.on_verl.wire import decode

        output = super().update_actor(batch)
        plan = decode(batch.extra_info["equipoise_plan"])
        if self.silent or not plan.timed:
            return output
        assert plan.sizes is not None
        lengths = iter(tag["seq_len"] for tag in batch.tags)
        own = [
            [[law([next(lengths) for _ in range(int(rows))]) for rows in sizes[rank]] for sizes in plan.sizes]
            for rank in range(plan.dp_size)
        ]
        times: list[float] = []
        for step in range(plan.num_mini_batches):
            slowest = np.max([rank[step] for rank in own], axis=0).tolist()
            times += [float(step), *slowest] * plan.dp_size
        output["metrics"]["equipoise_seconds"] = times
        return output


def law(lengths: list[int]) -> float:
    """Seconds of a micro-batch of :class:`TimedGroups`."""
    return 0.01 + sum(1e-4 * n + 4e-7 * n * n for n in lengths)


def describe(wire: bytes) -> dict[str, Any]:
    """A plan on its way to the workers, as plain values."""
    from equipoise.trainer_hooks.on_verl.wire import decode

    plan = decode(wire)
    return {
        "dp": plan.dp_size,
        "steps": plan.num_mini_batches,
        "real": plan.num_real_rows.tolist(),
        "sizes": None if plan.sizes is None else [s.tolist() for s in plan.sizes],
    }


@functools.cache
def _composed(overrides: tuple[str, ...]) -> Any:
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=list(overrides))


def config(*overrides: str) -> Any:
    """verl's own configuration with the group; only a choice of a preset is composed anew."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import ConfigKeyError

    groups = tuple(line for line in overrides if line.startswith("equipoise="))
    made = copy.deepcopy(_composed((*BASE, *groups)))
    for line in OverridesParser.create().parse_overrides([line for line in overrides if line not in groups]):
        key = line.get_key_element().removeprefix("+")
        with open_dict(made):
            if not line.is_add() and OmegaConf.select(made, key, default=line) is line:
                raise ConfigKeyError(key)
            OmegaConf.update(made, key, line.value(), force_add=True)
    OmegaConf.resolve(made)
    return made


def trainer(*overrides: str, dp: int = 4) -> Any:
    """A constructed v1 trainer whose worker groups are only known by their dispatch."""
    return constructed(config(f"trainer.n_gpus_per_node={dp}", *overrides), dp=dp)


@functools.cache
def _trainer_class() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns of each engine that is not installed
        from verl.trainer.ppo.v1 import get_trainer_cls
    return get_trainer_cls("sync")


def constructed(made_config: Any, *, dp: int = 4) -> Any:
    made = _trainer_class()(made_config)
    made.actor_rollout_wg = Groups(actor=dp)
    made.critic_wg = Groups(train=dp)
    made.ref_policy_wg = Groups(ref=dp)
    made.ref_in_actor = False
    made.global_steps = 1
    made.distillation_config = None
    made.tokenizer = SimpleNamespace(eos_token_id=2)
    return made


def rows(lengths: list[int], *, group: int = 2, prompt: int = 4) -> tuple[list[str], list[dict[str, Any]], list[Any]]:
    """Keys, columns and tags of rows, ``group`` of them to a prompt."""
    keys: list[str] = []
    fields: list[dict[str, Any]] = []
    tags: list[Any] = []
    for i, n in enumerate(lengths):
        ids = torch.arange(n) % 97 + 3
        uid = uuid.UUID(int=i // group * 7919 % 2**32).hex
        fields.append(
            {
                "prompts": ids[:prompt],
                "responses": ids[prompt:],
                "input_ids": ids,
                "position_ids": torch.arange(n),
                "attention_mask": torch.ones(n, dtype=torch.long),
                "response_mask": torch.ones(n - prompt, dtype=torch.long),
                "loss_mask": torch.ones(n - prompt, dtype=torch.long),
                "rm_scores": torch.zeros(n - prompt),
                "rollout_log_probs": torch.zeros(n - prompt),
                "uid": uid,
                "num_turns": 2,
                "session_id": i % group,
            }
        )
        tags.append({"status": "success", "prompt_len": prompt, "response_len": n - prompt, "seq_len": n})
        keys.append(f"{uid}_{i % group}_0")
    return keys, fields, tags


class MemoryQueue:
    """``kv_batch_get`` and ``kv_batch_put`` of TransferQueue, in this process."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], dict[str, Any]] = {}

    @classmethod
    def installed(cls, monkeypatch: Any) -> MemoryQueue:
        """In place of TransferQueue's for one test."""
        import transfer_queue

        made = cls()
        monkeypatch.setattr(transfer_queue, "kv_batch_get", made.kv_batch_get)
        monkeypatch.setattr(transfer_queue, "kv_batch_put", made.kv_batch_put)
        return made

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any, tags: list[Any]) -> Any:
        from transfer_queue import KVBatchMeta

        assert len(keys) == len(set(keys)) == len(tags) == len(fields)
        for i, key in enumerate(keys):
            row = fields[i]
            self.kept[partition_id, key] = {name: row[name] for name in row.keys()}  # noqa: SIM118
        return KVBatchMeta(keys=keys, tags=tags, partition_id=partition_id)

    def kv_batch_get(self, keys: list[str], partition_id: str) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        return list_of_dict_to_tensordict([self.kept[partition_id, key] for key in keys])

    def put(self, lengths: list[int], *, group: int = 2) -> Any:
        """A batch of rows of these lengths."""
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        keys, fields, tags = rows(lengths, group=group)
        return self.kv_batch_put(keys, f"train-{uuid.uuid4().hex[:6]}", list_of_dict_to_tensordict(fields), tags)


def lengths_of(batch: Any) -> list[int]:
    return [tag["seq_len"] for tag in batch.tags]


def padding_of(batch: Any) -> list[bool]:
    return [bool(tag.get("is_padding", False)) for tag in batch.tags]
