"""verl's real ``PPOTrainer`` and a real TransferQueue: padding rows on their way through it.

Run as a program: ``python -m tests.integration.driver_rig OUT``. Writes what came back as JSON.
"""

# verl is not typed; the tests check what comes from it.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

import torch

from tests.unit.verl_driver import LENGTHS, lengths_of, padding_of, rows, trainer


def put(lengths: list[int], *, media: bool) -> Any:
    """Rows in TransferQueue; with side data of every kind and positions of several dimensions where asked for."""
    import transfer_queue as tq
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    keys, fields, tags = rows(lengths)
    for row, n in zip(fields, lengths, strict=True):
        if media:
            row |= {
                "position_ids": torch.arange(n).expand(4, n).contiguous(),
                "routed_experts": torch.ones(n, 2, 3, dtype=torch.int64),
                "teacher_logprobs": torch.ones(n, 5),
                "multi_modal_inputs": {"pixel_values": torch.ones(3, 2)},
                "raw_prompt": [{"role": "user", "content": "?"}],
                "data_source": "tiny",
                "acc": 1.0,
            }
    partition = f"train-{uuid.uuid4().hex[:6]}"
    return tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)


def balanced(*, media: bool) -> dict[str, Any]:
    """A batch after the hook: its rows, and the padding rows as they come out of the queue among real ones."""
    import transfer_queue as tq

    made, metrics = trainer(), {}
    batch = made._balance_batch(put(LENGTHS, media=media), metrics)
    made._update_actor(batch, metrics)
    data: Any = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    padding = [i for i, pad in enumerate(padding_of(batch)) if pad]
    return {
        "keys": batch.keys,
        "lengths": lengths_of(batch),
        "sent": made.actor_rollout_wg.sent,
        "columns": sorted(map(str, data.keys())),
        "padding": [{str(name): plain(data[i][name]) for name in data.keys()} for i in padding],  # noqa: SIM118
        "uids": data.get("uid").tolist(),
    }


def plain(value: Any) -> Any:
    """A tensor as (shape, its largest value), anything else as it is."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), float(value.max()) if value.numel() else None]
    return value


def main(out: str) -> None:
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    storage = {"total_storage_size": 100_000, "num_data_storage_units": 1}
    backend = {"storage_backend": "SimpleStorage", "SimpleStorage": storage}
    tq.init(OmegaConf.create({"enable": True, "metrics": {"enabled": False, "port": 0}, "backend": backend}))
    found = {name: balanced(media=name == "media") for name in ("text", "media")}
    Path(out).write_text(json.dumps(found, default=repr))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
