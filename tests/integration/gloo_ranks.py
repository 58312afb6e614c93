"""Ranks of a test as processes that meet over gloo."""

from __future__ import annotations

import datetime
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist


def start(
    target: Callable[[int, str], None], world_size: int, folder: Path, *, preload: Sequence[str]
) -> list[int | None]:
    """Run ``target(rank, folder)`` in a process for each rank; exit codes by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))  # heavy modules are imported once
    ranks = [context.Process(target=target, args=(rank, str(folder))) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in ranks]


def join(rank: int, world_size: int, folder: str) -> None:
    """Make this process a rank of the default group, on one thread."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
