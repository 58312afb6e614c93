"""Real verl training workers (FSDP2 over gloo) on a few processes, without Ray: one scenario after the other.

Run as a program: ``python -m tests.integration.engine_rig MODEL_DIR OUT``. Two ranks together and one alone write what
they saw to ``OUT.<ranks>.<rank>.pt``; the tests compare.
"""

# verl is not typed; the tests check what comes from it.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import equipoise as eq

LENGTHS = [20, 40, 60, 200, 33, 47, 150, 90, 30, 30, 310, 50, 64, 70, 80, 91]
"""16 rows: two mini-batches of 8."""
CAP = 330
PROMPT = 8
VOCABULARY = 300


def rows(lengths: list[int], *, padding: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows with content that depends on their number only, then padding rows as the hook has verl make them."""
    out: list[dict[str, torch.Tensor]] = []
    for i, n in enumerate([*lengths, *[2] * padding]):
        draw = torch.Generator().manual_seed(i)
        pad = i >= len(lengths)
        prompt = 1 if pad else PROMPT
        ids = torch.randint(3, VOCABULARY, (n,), generator=draw)
        mask = torch.zeros(n - prompt, dtype=torch.int64) if pad else torch.ones(n - prompt, dtype=torch.int64)
        out.append(
            {
                "input_ids": ids,
                "position_ids": torch.arange(n),
                "prompts": ids[:prompt],
                "responses": ids[prompt:],
                "response_mask": mask,
                "loss_mask": mask,
                "old_log_probs": torch.full((n - prompt,), -6.0),
                "advantages": torch.zeros(n - prompt) if pad else torch.randn(n - prompt, generator=draw),
            }
        )
    return out


def under_the_mask(chosen: list[dict[str, torch.Tensor]], value: float) -> list[dict[str, torch.Tensor]]:
    """The rows with every fourth token of a response out of the loss, and ``value`` in what the loss reads there."""
    out: list[dict[str, torch.Tensor]] = []
    for row in chosen:
        made = {name: column.clone() for name, column in row.items()}
        for name in ("response_mask", "loss_mask"):
            made[name][::4] = 0
        for name in ("old_log_probs", "advantages"):
            made[name][::4] = value
        out.append(made)
    return out


def batch_of(chosen: list[dict[str, torch.Tensor]]) -> Any:
    """Rows as the jagged batch that verl's dispatch hands to a worker."""
    from verl.utils import tensordict_utils as tu

    columns: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([row[name] for row in chosen], layout=torch.jagged) for name in chosen[0]
    }
    return tu.get_tensordict(columns, non_tensor_dict={"temperature": 1.0})


def worker(model: str, *, dynamic: bool = True, cap: int = CAP, micro_rows: int = 2, mode: str = "token-mean") -> Any:
    """A training worker with plain SGD, so that weights show the gradient."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model,
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=True,
            enable_gradient_checkpointing=False,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            use_dynamic_bsz=dynamic,
            max_token_len_per_gpu=cap,
            infer_max_token_len_per_gpu=cap,
            micro_batch_size_per_gpu=micro_rows,
            infer_micro_batch_size_per_gpu=micro_rows,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD", lr=0.1, weight_decay=0.0, total_training_steps=10, betas=(0.9, 0.999)
        ),
        checkpoint_config=CheckpointConfig(),
    )
    made = TrainingWorker(config=config)
    made.reset()
    actor = FSDPActorConfig(
        strategy="fsdp2",
        use_dynamic_bsz=dynamic,
        ppo_mini_batch_size=8,
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=None if dynamic else micro_rows,
        loss_agg_mode=mode,
    )
    made.set_loss_fn(partial(ppo_loss, config=actor))
    return made


@contextmanager
def counted_collectives() -> Any:
    """Count what this process asks of the group while the block runs."""
    counts: dict[str, int] = {}
    saved: dict[str, Callable[..., Any]] = {}
    for name in ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier", "reduce_scatter"):
        saved[name] = getattr(dist, name)

        def call(*args: Any, _name: str = name, **kwargs: Any) -> Any:
            counts[_name] = counts.get(_name, 0) + 1
            return saved[_name](*args, **kwargs)

        setattr(dist, name, call)
    try:
        yield counts
    finally:
        for name, function in saved.items():
            setattr(dist, name, function)


@contextmanager
def heard_warnings() -> Any:
    """What the hook warns of while the block runs."""
    from equipoise.trainer_hooks.on_verl.worker import micro_batches as hook

    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener()
    logging.getLogger("equipoise").addHandler(listener)
    hook._warned.clear()  # pyright: ignore[reportPrivateUsage]
    try:
        yield heard
    finally:
        logging.getLogger("equipoise").removeHandler(listener)


@contextmanager
def recorded_micro_batches() -> Any:
    """Row lengths of each micro-batch that the engine got, call by call."""
    from verl.workers.engine.fsdp import transformer_impl

    engine: Any = transformer_impl

    from equipoise.training.batch import token_lengths

    calls: list[list[list[int]]] = []
    inner = engine.prepare_micro_batches

    def call(*args: Any, **kwargs: Any) -> Any:
        micro_batches, indices = inner(*args, **kwargs)
        # by index: timed micro-batches are for the engine to go through
        calls.append([token_lengths(micro_batches[i]).tolist() for i in range(len(micro_batches))])
        return micro_batches, indices

    engine.prepare_micro_batches = call
    try:
        yield calls
    finally:
        engine.prepare_micro_batches = inner


def planned(
    lengths: list[int],
    world: int,
    *,
    steps: int,
    padding: int = 0,
    cap: int | None = CAP,
    micro_rows: int | None = None,
    timed: bool = False,
) -> tuple[eq.StepPlan, bytes]:
    """A plan and what the driver would send of it."""
    from equipoise.trainer_hooks.on_verl.wire import encode, wire_of

    whole = np.array([*lengths, *[2] * padding])
    spec = eq.StepSpec(
        dp_size=world, num_mini_batches=steps, max_token_len_per_gpu=cap, micro_batch_size_per_gpu=micro_rows
    )
    plan = eq.plan_step(whole, spec, is_padding=np.arange(whole.size) >= len(lengths))
    return plan, encode(wire_of(plan, whole, timed=timed))


def update(
    model: str,
    share: list[dict[str, torch.Tensor]],
    *,
    rows_per_step: int,
    wire: bytes | None,
    dynamic: bool = True,
    micro_rows: int = 2,
    mode: str = "token-mean",
    engine_cap: int = CAP,
    exact: bool = False,
) -> dict[str, Any]:
    """One ``train_mini_batch`` from fresh weights; what it logged, the weights, and how it went about it."""
    from verl.utils import tensordict_utils as tu

    made = worker(model, dynamic=dynamic, cap=engine_cap, micro_rows=micro_rows, mode=mode)
    data = batch_of(share)
    tu.assign_non_tensor(
        data,
        mini_batch_size=rows_per_step,
        global_batch_size=rows_per_step,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
    )
    if wire is not None:
        tu.assign_non_tensor(data, equipoise_plan=wire)
    if exact:
        tu.assign_non_tensor(data, equipoise_exact_loss=True)
    with counted_collectives() as counts, heard_warnings() as heard, recorded_micro_batches() as micro_batches:
        began = time.perf_counter()
        output = made.train_mini_batch(data)
        wall_s = time.perf_counter() - began
    metrics = tu.get(output, "metrics")
    weights = {name: p.full_tensor().detach().clone() for name, p in made.engine.module.named_parameters()}
    return {
        "loss": metrics["loss"],
        "pg_loss": metrics["actor/pg_loss"],
        "grad_norm": metrics["grad_norm"],
        "weights": weights,
        "seconds": metrics.get("equipoise_seconds"),
        "wall_s": wall_s,
        "collectives": dict(counts),
        "warnings": list(heard),
        "micro_batches": micro_batches,
    }


def infer(
    model: str, share: list[dict[str, torch.Tensor]], *, wire: bytes | None, dynamic: bool = True
) -> dict[str, Any]:
    """One log-prob pass; its outputs row by row."""
    from verl.utils import tensordict_utils as tu

    made = worker(model, dynamic=dynamic)
    data = batch_of(share)
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    if wire is not None:
        tu.assign_non_tensor(data, equipoise_plan=wire)
    with counted_collectives() as counts, heard_warnings() as heard, recorded_micro_batches() as micro_batches:
        output = made.infer_batch(data)
    return {
        "log_probs": [row.clone() for row in output["log_probs"].unbind()],
        "entropy": [row.clone() for row in output["entropy"].unbind()],
        "collectives": dict(counts),
        "warnings": list(heard),
        "micro_batches": micro_batches,
    }


def scenarios(model: str, rank: int, world: int) -> dict[str, Any]:
    """Everything that the tests compare, by name."""
    out: dict[str, Any] = {}
    every = rows(LENGTHS)
    plan, wire = planned(LENGTHS, world, steps=2, timed=True)
    mine = [every[i] for i in plan.rank_rows(rank)]
    out["update/verl"] = update(model, mine, rows_per_step=8, wire=None)
    out["update/plan"] = update(model, mine, rows_per_step=8, wire=wire)
    fixed_plan, fixed_wire = planned(LENGTHS, world, steps=2, cap=None, micro_rows=2, timed=True)
    fixed = [every[i] for i in fixed_plan.rank_rows(rank)]
    out["fixed/plan"] = update(model, fixed, rows_per_step=8, wire=fixed_wire, dynamic=False)
    out["fixed/rows"] = [[LENGTHS[i] for i in m] for step in fixed_plan.micro_batches(rank) for m in step]
    out["plan/rows"] = [[[LENGTHS[i] for i in m] for m in step] for step in plan.micro_batches(rank)]

    short = LENGTHS[:7]
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        padded_plan, padded_wire = planned(short, world, steps=1, padding=1)
        padded = rows(short, padding=1)
        share = [padded[i] for i in padded_plan.rank_rows(rank)]
        out[f"padded/{mode}"] = update(model, share, rows_per_step=8, wire=padded_wire, mode=mode)
        out[f"exact/{mode}"] = update(model, share, rows_per_step=8, wire=padded_wire, mode=mode, exact=True)
    for value in (0.0, float("nan")):
        share = under_the_mask([padded[i] for i in padded_plan.rank_rows(rank)], value)
        out[f"masked/{value}"] = update(model, share, rows_per_step=8, wire=padded_wire, exact=True)

    passes, pass_wire = planned(LENGTHS, world, steps=1)
    share = [every[i] for i in passes.rank_rows(rank)]
    out["infer/verl"] = infer(model, share, wire=None)
    out["infer/plan"] = infer(model, share, wire=pass_wire)

    other = [dict(row) for row in mine]
    if rank == world - 1:  # one rank's rows differ from the planned ones
        other[0], other[1] = rows([LENGTHS[0] + 1])[0], other[0]
    out["strange/update"] = update(model, other, rows_per_step=8, wire=wire)
    strange = [dict(row) for row in share]
    if rank == world - 1:
        strange[0] = rows([LENGTHS[0] + 1])[0]
    out["strange/infer"] = infer(model, strange, wire=pass_wire)
    out["small_cap"] = update(model, mine, rows_per_step=8, wire=wire, engine_cap=312)
    return out


def alone(model: str) -> dict[str, Any]:
    """The seven real rows alone, on one process, as verl runs them."""
    share = rows(LENGTHS[:7])
    return {
        f"alone/{mode}": update(model, share, rows_per_step=7, wire=None, mode=mode)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    }


def main(rank: int, world: int, model: str, port: int, out: str) -> None:
    """One rank."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    found = scenarios(model, rank, world) if world > 1 else alone(model)
    torch.save(found, f"{out}.{world}.{rank}.pt")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in ("verl", "verl.workers.engine_workers", "verl.workers.utils.losses"):
        importlib.import_module(module)  # once, for all ranks; the first loads the plugins
    for size in (2, 1):
        arguments = (size, sys.argv[1], free_port(), sys.argv[2])
        start_processes(main, args=arguments, nprocs=size, start_method="fork")
