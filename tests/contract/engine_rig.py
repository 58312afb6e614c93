"""Every engine through the same scenarios, on 1, 2 and 4 gloo processes forked from one that has imported all.

Run as a program: ``python -m tests.contract.engine_rig OUT_DIR``. Ranks write what they saw to
``OUT_DIR/world<N>.<rank>.pt``; the tests compare. It never touches the process group of pytest.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.multiprocessing.spawn import start_processes

import equipoise as eq
from equipoise.training.engine import prepare_micro_batches
from tests.contract import engine_reference as ref
from tests.contract.engine_parts import counted, free_port, refused
from tests.contract.engine_states import STAGES, checkpoints, from_folder, killed, resume_killed, states
from tests.contract.engine_training import (
    empty_step_on_an_empty_rank,
    equality,
    losses,
    moves,
    sequence_parallel,
    skipped,
    variants,
    zero_weight,
)


def micro_batches(out: dict[str, Any], rank: int, world: int) -> None:
    """Agreement of two ranks on a count, and on errors that only one of them has."""
    group = dist.group.WORLD

    def lengths(first: list[int], other: list[int]) -> Any:
        mine = first if rank == 0 else other
        if not mine:
            return TensorDict({}, batch_size=[0])
        ids = torch.nested.as_nested_tensor([torch.arange(n) for n in mine], layout=torch.jagged)
        return TensorDict({"input_ids": ids}, batch_size=[len(mine)])

    def sizes(cut: Any) -> list[list[int]]:
        return [rows.tolist() for rows in cut.indices]

    with counted() as calls:
        c1 = prepare_micro_batches(lengths([95] * 5, [20] * 5), max_token_len=100, group=group)
    out["C1"] = {"indices": sizes(c1), "collectives": calls[0]}
    out["C1/no group"] = refused(lambda: prepare_micro_batches(lengths([95], [20]), max_token_len=100))
    c2 = lengths([9] * 4, [2] * 2)
    out["C2/error"] = refused(lambda: prepare_micro_batches(c2, max_token_len=10, group=group))
    filled = prepare_micro_batches(c2, max_token_len=10, on_shortage="zero_weight", group=group)
    out["C2/zero_weight"] = {"indices": sizes(filled), "rows": [len(one) for one in filled.batches]}
    b3 = lengths([4097, 5], [5, 5])
    out["B3/error"] = refused(lambda: prepare_micro_batches(b3, max_token_len=4096, group=group))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = prepare_micro_batches(b3, max_token_len=4096, oversize="alone", group=group)
    out["B3/alone"] = sizes(alone)
    odd = lengths([3] * 4, [3] * 3)
    out["H6/odd"] = refused(lambda: prepare_micro_batches(odd, max_token_len=8, force_group_size=2, group=group))
    out["fixed"] = refused(lambda: prepare_micro_batches(odd, micro_batch_size=2, group=group))
    nothing = lengths([3], [3])
    if rank == world - 1:
        del nothing["input_ids"]
    out["malformed"] = refused(lambda: prepare_micro_batches(nothing, max_token_len=8, group=group))
    cap = 8 if rank == 0 else 9
    out["settings"] = refused(lambda: prepare_micro_batches(lengths([3], [3]), max_token_len=cap, group=group))
    empty = lengths([9, 9], [])
    out["empty"] = sizes(prepare_micro_batches(empty, max_token_len=10, on_shortage="zero_weight", group=group))
    plan = eq.plan_step([5, 4, 3, 2], eq.StepSpec(dp_size=world, max_token_len_per_gpu=5))
    data = lengths([1] * 2, [1] * 2)
    with counted() as calls:
        by_plan = prepare_micro_batches(data, plan=plan, group=group)
    out["planned"] = {"indices": sizes(by_plan), "collectives": calls[0]}


def scenarios(rank: int, world: int, folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if world == 4:
        sequence_parallel(out)
        losses(out, world)
        return out
    equality(out, world)
    skipped(out)
    checkpoints(out, folder, world)
    if world == 1:
        moves(out)
        states(out)
        losses(out, world)
        return out
    variants(out)
    sequence_parallel(out)
    zero_weight(out, world)
    empty_step_on_an_empty_rank(out)
    micro_batches(out, rank, world)
    from_folder(out, folder)
    return out


def main(rank: int, world: int, folder: str, port: int) -> None:
    """One rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    torch.save(scenarios(rank, world, Path(folder)), f"{folder}/world{world}.{rank}.pt")
    dist.destroy_process_group()


def forked(target: Callable[..., None], *args: Any) -> int:
    """Exit status of ``target`` in a process of its own."""
    pid = os.fork()
    if pid == 0:
        target(*args)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    where = sys.argv[1]
    torch.set_num_threads(1)
    ref.hf_model("llama").save_pretrained(f"{where}/model")
    for name in ("equipoise.training.engine.ddp", "equipoise.training.engine.fsdp2"):
        __import__(name)
    for size in (1, 2, 4):
        start_processes(main, args=(size, where, free_port()), nprocs=size, start_method="fork")
    deaths = {stage: forked(killed, stage, where) for stage in STAGES}
    for stage in STAGES:
        forked(resume_killed, stage, where)
    torch.save(deaths, f"{where}/deaths.pt")
