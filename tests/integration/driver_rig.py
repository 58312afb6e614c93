"""verl's real ``PPOTrainer`` and TransferQueue on the driver side; worker groups only say how they dispatch.

Run as a program: ``python -m tests.integration.driver_rig OUT``. Writes what each scenario saw as JSON.
"""

# verl is not typed; the tests check what comes from it.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import logging
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class Groups:
    """A worker group as the driver sees it: a dispatch mapping, and calls that keep what they were sent."""

    def __init__(self, **meshes: int) -> None:
        self._dispatch_info = {mesh: list(range(dp)) for mesh, dp in meshes.items()}
        self.sent: list[dict[str, Any]] = []

    def _keep(self, batch: Any) -> None:
        wire = batch.extra_info.get("equipoise_plan")
        self.sent.append({"keys": list(batch.keys), "wire": None if wire is None else describe(wire)})

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
        "bytes": len(wire),
    }


def config(overrides: list[str]) -> Any:
    """verl's own configuration with the group."""
    import hydra
    from omegaconf import OmegaConf

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        made = hydra.compose("ppo_trainer", overrides=overrides)
    OmegaConf.resolve(made)
    return made


BASE = [
    "+equipoise=default",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=hf_cpu",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "critic.strategy=fsdp2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=600",
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]


def trainer(overrides: list[str], *, dp: int = 4) -> Any:
    """A constructed v1 trainer whose worker groups are only known by their dispatch."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    made: Any = get_trainer_cls("sync")(config([*BASE, f"trainer.n_gpus_per_node={dp}", *overrides]))
    made.actor_rollout_wg = Groups(actor=dp)
    made.critic_wg = Groups(train=dp)
    made.ref_policy_wg = Groups(ref=dp)
    made.ref_in_actor = False
    made.global_steps = 1
    made.distillation_config = None
    made.tokenizer = SimpleNamespace(eos_token_id=2)
    return made


def put(lengths: list[int], *, group: int = 2) -> Any:
    """Rows in TransferQueue, ``group`` of them to a prompt."""
    import transfer_queue as tq
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    fields, tags, keys = [], [], []
    uids = [uuid.UUID(int=i * 7919 % 2**32).hex for i in range(-(-len(lengths) // group))]
    for i, n in enumerate(lengths):
        prompt = 4
        ids = torch.arange(n) % 97 + 3
        uid = uids[i // group]
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
    partition = f"train-{uuid.uuid4().hex[:6]}"
    return tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)


def seen(batch: Any) -> dict[str, Any]:
    """A batch as plain values."""
    return {
        "keys": list(batch.keys),
        "lengths": [tag["seq_len"] for tag in batch.tags],
        "padding": [bool(tag.get("is_padding", False)) for tag in batch.tags],
    }


LENGTHS = [int(n) for n in np.random.default_rng(0).integers(6, 300, 30)]


def padded_and_planned() -> Any:
    import transfer_queue as tq

    made, metrics = trainer([]), {}
    before = put(LENGTHS)
    batch = made._balance_batch(before, metrics)
    pads = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding")]
    data = tq.kv_batch_get(keys=pads, partition_id=batch.partition_id)
    made._update_actor(batch, metrics)
    return {
        "batch": seen(batch),
        "metrics": metrics,
        "sent": made.actor_rollout_wg.sent,
        "pad_uids": data["uid"].tolist() if hasattr(data["uid"], "tolist") else list(data["uid"]),
        "pad_masks": [row.tolist() for row in data["response_mask"].unbind()],
        "pad_ids": [row.tolist() for row in data["input_ids"].unbind()],
    }


def actor_and_critic_differ() -> Any:
    made = trainer(["algorithm.adv_estimator=gae", "critic.enable=True", "critic.ppo_mini_batch_size=8"])
    metrics: dict[str, Any] = {}
    batch = made._balance_batch(put(LENGTHS), metrics)
    batch = made._update_critic(batch, metrics)
    batch = made._update_actor(batch, metrics)
    return {
        "batch": seen(batch),
        "critic": made.critic_wg.sent,
        "actor": made.actor_rollout_wg.sent,
        "left": sorted(batch.extra_info),
        "metrics": metrics,
    }


def critic_warmup() -> Any:
    made = trainer(
        [
            "algorithm.adv_estimator=gae",
            "critic.enable=True",
            "critic.ppo_mini_batch_size=5",
            "trainer.critic_warmup=3",
        ],
        dp=2,
    )
    return seen(made._balance_batch(put(LENGTHS[:18]), {}))


def a5() -> Any:
    made = trainer(
        [
            "algorithm.adv_estimator=gae",
            "critic.enable=True",
            "critic.ppo_mini_batch_size=48",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
            "actor_rollout_ref.rollout.n=4",
        ],
        dp=8,
    )
    return seen(made._balance_batch(put([8] * 700, group=4), {}))


def not_balanced() -> Any:
    made, metrics = trainer(["trainer.balance_batch=False"]), {}
    before = put(LENGTHS)
    keys = list(before.keys)
    batch = made._balance_batch(before, metrics)
    made._update_actor(batch, metrics)
    return {"before": keys, "batch": seen(batch), "metrics": metrics, "sent": made.actor_rollout_wg.sent}


def switched_off() -> Any:
    made, metrics = trainer(["equipoise=off"]), {}
    batch = made._balance_batch(put(LENGTHS), metrics)
    return {"own_methods": sorted(set(vars(made)) & set(dir(type(made)))), "batch": seen(batch), "metrics": metrics}


def measured_only() -> Any:
    made, metrics = trainer(["equipoise=verl"]), {}
    batch = made._balance_batch(put(LENGTHS), metrics)
    return {"batch": seen(batch), "metrics": metrics, "method": made._update_actor.__func__ is type(made)._update_actor}


def shuffled() -> Any:
    made, metrics = trainer(["actor_rollout_ref.actor.shuffle=True"]), {}
    batch = made._balance_batch(put(LENGTHS), metrics)
    made._update_actor(batch, metrics)
    return {"sent": made.actor_rollout_wg.sent}


def fails(*overrides: str, lengths: list[int] | None = None, dp: int = 4, check: bool = False) -> Callable[[], Any]:
    def scenario() -> Any:
        try:
            made = trainer(list(overrides), dp=dp)
            if check:
                made.init()
            if lengths is not None:
                batch = put(lengths)
                made._balance_batch(batch, {})
        except Exception as error:  # noqa: BLE001 - the test looks at which one it is
            return {"type": type(error).__name__, "text": str(error)}
        return {"type": None, "text": ""}

    return scenario


def other_verl() -> Any:
    from verl.trainer.ppo.v1 import trainer_base

    trainer_class: Any = trainer_base.PPOTrainer
    original = trainer_class._update_actor

    def _update_actor(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        return original(self, batch, metrics)

    trainer_class._update_actor = _update_actor
    try:
        return {
            "checked": fails()(),
            "at_own_risk": fails("equipoise.check_patch_points=False")(),
        }
    finally:
        trainer_class._update_actor = original


def plain_string() -> Any:
    """What Hydra makes of ``+equipoise=default`` when it does not find the group."""
    from omegaconf import open_dict
    from verl.trainer.ppo.v1 import get_trainer_cls

    made = config(BASE)
    with open_dict(made):
        made.equipoise = "default"
    try:
        get_trainer_cls("sync")(made)
    except Exception as error:  # noqa: BLE001 - the test looks at which one it is
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": None, "text": ""}


def filtered_rows() -> Any:
    """A custom trainer that drops prompts after balancing."""
    made, metrics = trainer([]), {}
    batch = made._balance_batch(put(LENGTHS), metrics)
    kept = batch.select_keys(sorted(batch.keys)[:16])
    made._update_actor(kept, metrics)
    return made.actor_rollout_wg.sent


def refitted() -> Any:
    """Six steps with cost=fitted; in the fifth the workers fall back."""
    from transformers import Qwen2Config

    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=100).save_pretrained(folder)
        record = Path(folder) / "record.jsonl"
        made = trainer(
            ["equipoise.cost=fitted", f"equipoise.record={record}", f"actor_rollout_ref.model.path={folder}"], dp=2
        )
        made.actor_rollout_wg = TimedGroups(actor=2)
        steps: list[dict[str, Any]] = []
        for step in range(6):
            metrics: dict[str, Any] = {}
            draw = np.random.default_rng(step)
            made.actor_rollout_wg.silent = step == 4
            batch = made._balance_batch(put([int(n) for n in draw.integers(6, 300, 32)]), metrics)
            made._update_actor(batch, metrics)
            steps.append(metrics)
        return {"metrics": steps, "costs": [json.loads(line)["cost"] for line in record.read_text().splitlines()]}


def main(out: str) -> None:
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("equipoise").addHandler(Listener())
    logging.getLogger("equipoise").setLevel(logging.INFO)
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    storage = {"total_storage_size": 100_000, "num_data_storage_units": 1}
    backend = {"storage_backend": "SimpleStorage", "SimpleStorage": storage}
    tq.init(OmegaConf.create({"enable": True, "metrics": {"enabled": False, "port": 0}, "backend": backend}))
    scenarios: dict[str, Callable[[], Any]] = {
        "padded_and_planned": padded_and_planned,
        "actor_and_critic_differ": actor_and_critic_differ,
        "critic_warmup": critic_warmup,
        "a5": a5,
        "not_balanced": not_balanced,
        "switched_off": switched_off,
        "measured_only": measured_only,
        "shuffled": shuffled,
        "filtered_rows": filtered_rows,
        "refitted": refitted,
        "measured_and_fitted": fails("equipoise=verl", "equipoise.cost=fitted"),
        "other_verl": other_verl,
        "unknown_key": fails("+equipoise.algoritm=kk"),
        "bad_value": fails("equipoise.algorithm=best"),
        "plain_string": plain_string,
        "mini_batch": fails("actor_rollout_ref.actor.ppo_mini_batch_size=3", "actor_rollout_ref.rollout.n=1"),
        "fixed_rows": fails(
            "actor_rollout_ref.actor.use_dynamic_bsz=False",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
        ),
        "row_above_cap": fails(lengths=[*LENGTHS, 601, 601]),
        "row_above_cap_alone": fails("equipoise.oversize=alone", lengths=[*LENGTHS, 601, 601]),
        "unwritable_record": fails("equipoise.record=/proc/nowhere/record.jsonl"),
    }
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        heard.clear()
        try:
            result = scenario()
        except Exception:  # noqa: BLE001 - one scenario must not hide the others
            result = {"crashed": traceback.format_exc()}
        results[name] = {"result": result, "heard": list(heard)}
    Path(out).write_text(json.dumps(results, default=float))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
