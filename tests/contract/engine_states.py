"""Scenarios of states: modes, offload, checkpoints, and saves that are killed."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import equipoise as eq
from equipoise.training.engine import BaseEngine, EngineConfig, checkpoint, engines
from tests.contract import engine_reference as ref
from tests.contract.engine_parts import ALL, BACKENDS, engine, free_port, refused, said, share, weights


def states(out: dict[str, Any]) -> None:
    """What is called out of its turn, and plans that are not the engine's."""
    made = engine("ddp", "language_model", "llama", max_token_len_per_gpu=ref.CAP)
    frozen = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP, optimizer=None)
    data, loss = ref.batch(ALL), ref.CountingLoss(tokens=1, dp_size=1)
    out["state/no mode"] = refused(lambda: made.train_batch(data, loss))
    with made.eval_mode():
        out["state/eval"] = refused(lambda: made.train_batch(data, loss))
        out["state/nested"] = refused(lambda: made.train_mode().__enter__())
    with frozen.train_mode():
        out["state/frozen"] = refused(lambda: frozen.train_batch(data, loss))
        out["state/frozen passes"] = len(frozen.infer_batch(data).model_output)
    uncut = engine("ddp", "language_model", "llama")
    with uncut.eval_mode():
        out["state/uncut"] = refused(lambda: uncut.infer_batch(data))
    spec = eq.StepSpec(dp_size=1, max_token_len_per_gpu=2 * ref.CAP)
    wide = eq.plan_step(ref.LENGTHS, spec)
    other = eq.plan_step(ref.LENGTHS, eq.StepSpec(dp_size=2, max_token_len_per_gpu=ref.CAP))
    with made.train_mode():
        out["state/cap"] = refused(lambda: made.train_batch(data, loss, plan=wide))
        out["state/ranks"] = refused(lambda: made.train_batch(data, loss, plan=other))
        mixed = eq.plan_step([*ref.LENGTHS[::-1]], eq.StepSpec(dp_size=1, max_token_len_per_gpu=ref.CAP))
        out["state/other rows"] = refused(lambda: made.train_batch(data, loss, plan=mixed))
        loose = engine("ddp", "language_model", "llama", max_token_len_per_gpu=8, oversize="alone")
        spec = eq.StepSpec(dp_size=1, max_token_len_per_gpu=8, oversize="alone")
        with warnings.catch_warnings(), loose.train_mode():
            warnings.simplefilter("ignore")
            alone = eq.plan_step(ref.LENGTHS, spec)
            rows = ref.batch(alone.rank_rows(0).tolist())
            out["state/alone"] = loose.train_batch(rows, loss, plan=alone).stepped

        def detached(columns: Any, rows: Any, group: Any) -> Any:
            return torch.tensor(1.0), {}

        def number(columns: Any, rows: Any, group: Any) -> Any:
            return columns["log_probs"].values().sum(), {"kl": 1.0}

        def bare(columns: Any, rows: Any, group: Any) -> Any:
            return columns["log_probs"].values().sum()

        out["state/bare"] = refused(lambda: made.train_batch(data, bare))
        out["state/detached"] = refused(lambda: made.train_batch(data, detached))
        out["state/number"] = refused(lambda: made.train_batch(data, number))
        out["state/no loss"] = refused(lambda: made.forward_backward_batch(data, None))
        out["state/mini_batch"] = refused(lambda: made.train_batch(data, loss, mini_batch=0))
        out["state/temperature"] = refused(lambda: made.infer_batch(data, temperature=0.0))
    sharing: dict[str, Any] = {"max_token_len_per_gpu": ref.CAP, "sp_size": 2}
    out["state/sp"] = refused(lambda: engine("ddp", "language_model", "llama", **sharing))


def checkpoints(out: dict[str, Any], folder: Path, world: int) -> None:
    """Two steps, a save, two more; and from the save in a new engine the same two again, of either backend."""
    for backend, kind, name in (("ddp", "language_model", "llama"), ("fsdp2", "value_model", "qwen2")):
        root = folder / f"checkpoint-{backend}-{world}"
        made = engine(backend, kind, name, max_token_len_per_gpu=ref.CAP)
        loss = ref.CountingLoss(tokens=ref.num_tokens(ALL), dp_size=made.get_data_parallel_size())
        data = ref.batch(share(made))

        def steps(made: BaseEngine, data: Any = data, loss: Any = loss) -> list[dict[str, Any]]:
            seen: list[dict[str, Any]] = []
            with made.train_mode():
                for _ in range(2):
                    seen.append(said(made.train_batch(data, loss), made))
                    made.lr_scheduler_step()
            return seen

        before = f"{root}-before"
        made.save_checkpoint(before)
        steps(made)
        made.load_checkpoint(before)  # back to before the first step, from after the second
        out[f"checkpoint/{backend}/again"] = {"steps": steps(made), "weights": weights(made)}
        made.save_checkpoint(root, global_step=2, extra={"seen": torch.tensor([3, 1]), "epoch": 1})
        on = {"steps": steps(made), "weights": weights(made)}
        resumed: dict[str, Any] = {}
        for other in BACKENDS:
            again = engine(other, kind, name, max_token_len_per_gpu=ref.CAP)
            extra = again.load_checkpoint(root)
            resumed[other] = {"extra": extra, "steps": steps(again), "weights": weights(again)}
        out[f"checkpoint/{backend}"] = {"on": on, "resumed": resumed}
    made = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP)
    root = folder / f"kept-{world}"
    for step in (1, 2, 3, 3):
        made.save_checkpoint(root, global_step=step, max_ckpt_to_keep=2)
    dist.barrier()
    out["checkpoint/kept"] = sorted(path.name for path in root.iterdir()), (root / "latest").read_text()
    out["checkpoint/errors"] = refused(lambda: made.load_checkpoint(root, global_step=9))


def from_folder(out: dict[str, Any], folder: Path) -> None:
    """A model on disk: under fsdp2 rank 0 alone reads the weights."""
    for backend in BACKENDS:
        config = EngineConfig(backend=backend, device="cpu", dtype="float64", max_token_len_per_gpu=ref.CAP)
        made = engines.create(config, folder / "model")
        made.initialize()
        out[f"folder/{backend}"] = weights(made)


STAGES = ("while writing", "before the rename", "before the pointer")


def killed(stage: str, folder: str) -> None:
    """Save a first checkpoint, then die within the save of the second."""
    root = Path(folder) / f"killed-{STAGES.index(stage)}"
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("gloo")
    made = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP)
    loss = ref.CountingLoss(tokens=ref.num_tokens(ALL), dp_size=1)
    made.save_checkpoint(root, global_step=1, extra={"step": 1})
    torch.save(weights(made), root.with_suffix(".pt"))
    with made.train_mode():
        made.train_batch(ref.batch(ALL), loss)

    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if stage == "while writing":
        os.fsync = _after(2, os.fsync, die)
    elif stage == "before the rename":
        Path.rename = die
    else:
        Path.replace = die
    made.save_checkpoint(root, global_step=2, extra={"step": 2})


def _after(calls: int, inner: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    left = [calls]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return then() if left[0] < 0 else inner(*args, **kwargs)

    return call


def resume_killed(stage: str, folder: str) -> None:
    """Load what is left, save once more and load that."""
    root = Path(folder) / f"killed-{STAGES.index(stage)}"
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("gloo")
    made = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP)
    found: dict[str, Any] = {"there": sorted(path.name for path in root.iterdir())}
    found["extra"] = made.load_checkpoint(root)
    found["weights"] = weights(made)
    made.save_checkpoint(root, global_step=2, extra={"step": 2})
    found["then"] = made.load_checkpoint(root)
    found["latest"] = checkpoint.find(root).name
    found["left"] = sorted(path.name for path in root.iterdir())
    torch.save(found, f"{root}.resumed.pt")
