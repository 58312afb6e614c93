"""One engine on its own processes, which do what they are told one job at a time and say how long it took."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import socket
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine_case import EngineCase
from benchmarks.engine_sides import SIDES

JOBS = ("log-probs", "log-probs and entropy", "update")
_STATUS = Path("/proc/self/status")
_MIB = 2**20


class RankFailed(RuntimeError):
    """A rank raised, ended or did not answer in time."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one job took on one rank.

    Attributes:
        seconds: between two barriers.
        processor_s: of all threads of the rank in that time.
        peak_mib: most resident memory during the job above that after the engine was made and had run once.
        figures: of an update: "loss", "grad_norm" and "micro_batches".
        log_probs: of a pass, of the responses' tokens.
    """

    seconds: float = 0.0
    processor_s: float = 0.0
    peak_mib: float = 0.0
    figures: dict[str, float] = field(default_factory=dict[str, float])
    log_probs: list[list[float]] = field(default_factory=list[list[float]])


class EngineProcesses:
    """``world`` gloo processes with one engine, alive until closed. Between jobs they wait without work.

    Args:
        name: one of :data:`benchmarks.engine_sides.SIDES`.
        case: what is run.
        world: processes.
        threads: of each process.
        log: file that gets what the processes print.
        timeout_s: the longest that one job may take.
    """

    def __init__(
        self, name: str, case: EngineCase, *, world: int, threads: int, log: Path, timeout_s: float = 600
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world):
            here, there = context.Pipe()
            place = Place(rank=rank, world=world, threads=threads, port=port, log=log)
            process = context.Process(target=serve, args=(there, name, case, place), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def wait(self) -> list[Reply]:
        """The replies of all ranks to the last job; the first one says that the engine is made."""
        replies: list[Reply] = []
        for rank, end in enumerate(self._ends):
            try:
                reply = end.recv() if end.poll(self.timeout_s) else f"no answer within {self.timeout_s:g} s"
            except EOFError:
                reply = "the process has ended"
            if not isinstance(reply, Reply):
                raise RankFailed(f"{self.name}, rank {rank}: {reply}")
            replies.append(reply)
        return replies

    def run(self, job: str, *, warm_up: bool = False) -> list[Reply]:
        """Do one of :data:`JOBS` on all ranks; a warm-up begins by returning freed memory to the system."""
        for end in self._ends:
            end.send((job, warm_up))
        return self.wait()

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one process stands: rank of ``world``, its threads, the port of rank 0, the file for what it prints."""

    rank: int
    world: int
    threads: int
    port: int
    log: Path


def serve(end: Connection, name: str, case: EngineCase, place: Place) -> None:
    """Body of one process."""
    with place.log.open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(place.port))
    torch.set_num_threads(place.threads)
    try:
        _serve(end, name, case, place)
    except EOFError:  # the other end has been closed
        pass
    except BaseException:  # whatever it is, the other side is told
        end.send(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(end: Connection, name: str, case: EngineCase, place: Place) -> None:
    importlib.import_module("verl")  # in every process, so that all start from the same memory
    importlib.import_module("verl.workers.engine")
    dist.init_process_group("cpu:gloo", rank=place.rank, world_size=place.world)
    side = SIDES[name](case, case.share(place.rank, place.world))
    side.initialize()
    side.log_probs(entropy=True)  # what is imported when first used is not the engine's memory
    _give_back()
    before = _resident_mib("VmRSS")
    end.send(Reply())
    ready = False
    while True:
        job, warm_up = end.recv()
        if job == "update" and not ready:
            noisy = [
                found + row["noise"][-found.numel() :]
                for found, row in zip(side.log_probs(entropy=False), side.rows, strict=True)
            ]
            side.set_old_log_probs(noisy)
            ready = True
        if warm_up:
            _give_back()
        _forget_peak()
        figures: dict[str, float] = {}
        log_probs: list[torch.Tensor] = []
        dist.barrier()
        began, processor = time.perf_counter(), time.process_time()
        if job == "update":
            figures = side.update()
        else:
            log_probs = side.log_probs(entropy=job == JOBS[1])
        processor_s = time.process_time() - processor
        dist.barrier()
        seconds = time.perf_counter() - began
        peak = _resident_mib("VmHWM") - before
        told = [row.tolist() for row in log_probs]
        end.send(Reply(seconds=seconds, processor_s=processor_s, peak_mib=peak, figures=figures, log_probs=told))


def _give_back() -> None:
    """Return freed memory to the system, so that resident memory is what is held."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _resident_mib(name: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (most since the last :func:`_forget_peak`)."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / _MIB
    raise RankFailed(f"{_STATUS} has no {name}; run on Linux")
