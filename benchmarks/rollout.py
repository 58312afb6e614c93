"""Time of one skewed rollout on two ranks of this machine, without and with moving: ``python -m benchmarks.rollout``.

Rank 0 has the long requests, rank 1 the short ones, as a dispatch that does not know lengths can leave them. Each rank
is a process with one thread. The same requests are decoded without moving, with their cache moved, and with the cache
computed again; tokens and log-probabilities must be equal to the bit.

Beside wall time stands the critical path in processor seconds: between two checks, the seconds of the busier rank,
summed over checks. It says the same on a machine that does other things as well.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers is typed in part only.

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

OUTPUTS = Path(__file__).parents[1] / "outputs" / "bench"
MODES = ("none", "kv", "recompute")
TITLES = {"none": "no moving", "kv": "cache sent", "recompute": "computed again"}
WORLD = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is decoded, and how.

    Args:
        model: folder of the model, or None for a tiny one with random weights.
        dtype: of the model.
        requests: of each rank.
        tiers: decode sizes.
        check_interval: decode steps between checks.
        repeats: runs of each mode; the modes take turns.
        long_tokens: median response of rank 0; the most is three times that.
        short_tokens: likewise of rank 1.
        folder: where ranks meet.
    """

    model: str | None
    dtype: str
    requests: int
    tiers: tuple[int, ...]
    check_interval: int
    repeats: int
    long_tokens: int
    short_tokens: int
    folder: str

    def lengths(self, rank: int) -> list[int]:
        """Response lengths of a rank: log-normal about its median with σ = 0.5, clipped; the same each time."""
        median = self.short_tokens if rank else self.long_tokens
        drawn = np.random.default_rng(rank).lognormal(np.log(median), 0.5, self.requests)
        return np.clip(drawn, 2, 3 * median).astype(int).tolist()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write; 1 where tokens differ."""
    options = _parse(argv)
    console = Console()
    console.width = max(console.width, 110)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            model=None if options.quick else str(options.model or _smollm2(console)),
            dtype=options.dtype,
            requests=options.requests,
            tiers=tuple(size for size in (64, 32, 16, 8, 4) if size <= max(4, options.requests)),
            check_interval=options.interval,
            repeats=options.repeats,
            long_tokens=options.long,
            short_tokens=options.short,
            folder=folder,
        )
        found = _measure(job, console)
    if found is None:
        return 2
    return _report(job, found, options.out, console)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rollout", description=main.__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model, whose steps cost the same at each tier: shows that it works, not what it saves",
    )
    parser.add_argument("--model", type=Path, help="folder of a causal language model (SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=int, help="of each rank (32; quick: 16)")
    parser.add_argument("--long", type=int, default=64, help="median response of rank 0 in tokens (%(default)s)")
    parser.add_argument("--short", type=int, default=8, help="median response of rank 1 in tokens (%(default)s)")
    parser.add_argument("--interval", type=int, default=8, help="decode steps between checks (%(default)s)")
    parser.add_argument("--repeats", type=int, help="runs of each mode (1; quick: 2)")
    parser.add_argument("--out", type=Path, default=OUTPUTS, help="folder of rollout.json")
    options = parser.parse_args(argv)
    options.requests = options.requests or (16 if options.quick else 32)
    options.repeats = options.repeats or (2 if options.quick else 1)
    return options


def _smollm2(console: Console) -> Path:
    """The 135M model as a folder that transformers reads, made on first use."""
    from examples.main_job.prepare import CACHE
    from examples.main_job.smollm2 import convert

    folder = CACHE / "smollm2-1"
    if not folder.exists():
        with console.status("converting the model, once (half a minute)"):
            convert(folder)
    return folder


def _measure(job: Job, console: Console) -> list[dict[str, Any]] | None:
    """What each rank saw, or None if one failed."""
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks = [context.Process(target=_rank, args=(rank, job, news)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    total = sum(sum(job.lengths(rank)) for rank in range(WORLD)) * len(MODES) * job.repeats
    columns = (TextColumn("rollout"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    results: dict[int, dict[str, Any]] = {}
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("loading the model and proving its decode shapes", total=total)
        while len(results) < WORLD:
            try:
                rank, what, amount = news.get(timeout=1)
            except queue.Empty:
                if any(process.exitcode for process in ranks):
                    break
                continue
            if what == "done":
                results[rank] = amount
            elif what == "mode":
                progress.update(task, description=f"{TITLES[amount]}")
            else:
                progress.update(task, advance=amount)
    for process in ranks:
        process.join(5)
        if process.is_alive():
            process.kill()
    if len(results) < WORLD:
        console.print("a rank failed; its error is above", style="red")
        return None
    return [results[rank] for rank in range(WORLD)]


def _rank(rank: int, job: Job, news: Any) -> None:
    """One process: all modes in turn on one engine."""
    import torch
    import torch.distributed as dist

    from equipoise.rollout.decode import DecodeConfig, DecodeEngine
    from equipoise.rollout.transfer.rebalancer import RebalancerConfig, RolloutRebalancer

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    model = _model(job)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/meet",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(minutes=10),
    )
    start = time.perf_counter()
    most = 64 + 3 * job.long_tokens
    engine = DecodeEngine(model, DecodeConfig(tiers=job.tiers, num_blocks=job.tiers[0] * (most // 16 + 1)))
    proof_s = time.perf_counter() - start
    asked = _requests(rank, job, engine.vocab_size)
    runs: list[dict[str, Any]] = []
    for mode in MODES * job.repeats:
        if rank == 0:
            news.put((rank, "mode", mode))
        config = RebalancerConfig(check_interval=job.check_interval, tiers=job.tiers, transfer=mode, profile_interval=1)
        runner = RolloutRebalancer(engine, None, config)
        dist.barrier()
        start, clock = time.perf_counter(), _Clock(runner.checks)

        def on_step(report: Any, clock: _Clock = clock) -> None:
            clock.tick()
            news.put((rank, "tokens", report.num_running))

        done = runner.generate(asked, on_step=on_step)
        seconds = time.perf_counter() - start
        tokens = [(state.id, state.output, state.log_probs) for state in done]
        checks = [asdict(check) for check in runner.checks]
        figures = {"seconds": seconds, "busy_s": clock.busy_s, "metrics": runner.metrics(), "checks": checks}
        runs.append({"mode": mode, "tokens": tokens, **figures})
    news.put((rank, "done", {"runs": runs, "proof_s": proof_s, "model": engine.facts().model}))
    news.close()
    news.join_thread()
    dist.destroy_process_group()


class _Clock:
    """Processor seconds of this rank before each check."""

    def __init__(self, checks: Sequence[Any]) -> None:
        self.checks = checks
        self.busy_s: list[float] = []
        self._last = time.process_time()

    def tick(self) -> None:
        now = time.process_time()
        self.busy_s += [0.0] * (len(self.checks) + 1 - len(self.busy_s))
        self.busy_s[len(self.checks)] += now - self._last
        self._last = now


def _critical_s(runs: Sequence[dict[str, Any]]) -> float:
    return sum(max(parts) for parts in zip_longest(*(run["busy_s"] for run in runs), fillvalue=0.0))


def _model(job: Job) -> Any:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[job.dtype]
    if job.model is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType]


def _requests(rank: int, job: Job, vocab_size: int) -> list[Any]:
    """Random prompts of 8 to 48 tokens; responses end at their length, so that each mode decodes as many tokens."""
    from equipoise.rollout.transfer import RequestState, Sampling

    draws = np.random.default_rng(10 + rank)
    made: list[RequestState] = []
    for index, length in enumerate(job.lengths(rank)):
        prompt = tuple(draws.integers(vocab_size, size=draws.integers(8, 49)).tolist())
        sampling = Sampling(seed=1000 * rank + index, temperature=float(index % 2), top_p=0.95, max_tokens=length)
        made.append(RequestState(id=f"{rank}/{index}", prompt=prompt, sampling=sampling))
    return made


def _report(job: Job, ranks: list[dict[str, Any]], out: Path, console: Console) -> int:
    equal = all(run["tokens"] == rank["runs"][0]["tokens"] for rank in ranks for run in rank["runs"])
    walls: dict[str, list[float]] = {mode: [] for mode in MODES}
    paths: dict[str, list[float]] = {mode: [] for mode in MODES}
    for runs in zip(*(rank["runs"] for rank in ranks), strict=True):
        walls[runs[0]["mode"]].append(max(run["seconds"] for run in runs))
        paths[runs[0]["mode"]].append(_critical_s(runs))
    tokens = sum(sum(job.lengths(rank)) for rank in range(WORLD))
    table = Table(title=f"{WORLD} ranks × {job.requests} requests, {tokens} tokens; {ranks[0]['model']}")
    for name in ("", "wall", "saved", "cpu", "saved", *(title for title, _, _ in _SHOWN)):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for mode in MODES:
        cells = [TITLES[mode]]
        for found in (walls, paths):
            median = float(np.median(found[mode]))
            cells += [f"{median:.2f}", f"{1 - median / float(np.median(found['none'])):.0%}"]
        figures = [run["metrics"] for rank in ranks for run in rank["runs"] if run["mode"] == mode]
        for _, name, form in _SHOWN:
            cells.append(form.format(float(np.mean([one[f"rollout/{name}"] for one in figures]))))
        table.add_row(*cells)
    console.print(table)
    console.print(f"proving the decode shapes took {max(rank['proof_s'] for rank in ranks):.1f} s, once per engine")
    console.print(
        "tokens and log-probs: " + ("equal to the bit" if equal else "DIFFERENT"), style="green" if equal else "red"
    )
    for rank in ranks:
        for run in rank["runs"]:
            del run["tokens"]
    out.mkdir(parents=True, exist_ok=True)
    content = {"job": asdict(job), "walls_s": walls, "critical_s": paths, "equal": equal, "ranks": ranks}
    (out / "rollout.json").write_text(json.dumps(content, indent=1))
    console.print(f"wrote {out / 'rollout.json'}", highlight=False)
    return 0 if equal else 1


_SHOWN = (
    ("moves", "moves", "{:.0f}"),
    ("KV bytes", "kv_bytes", "{:.2g}"),
    ("sending", "exchange_s", "{:.2f}"),
    ("idle", "idle_share", "{:.0%}"),
    ("tier", "tier_mean", "{:.1f}"),
    ("predicted", "saved_predicted_s", "{:.2f}"),
    ("measured", "saved_measured_s", "{:.2f}"),
)
"""Title, metric and format of the columns that come from the ranks' metrics, as means over ranks; times in seconds."""

if __name__ == "__main__":
    sys.exit(main())
