"""Engines beside verl's FSDP2 engine, on gloo processes: ``python benchmarks/engine.py``, or with ``--quick``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # run as a script, the folder of this file would be there

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import baseline, engine_table
from benchmarks.engine_case import EngineCase, log_normal_lengths, write_tiny_llama
from benchmarks.engine_measure import Pair, measure, runs
from equipoise.trainer_hooks.verl_on_cpu.launch import cpu_environment

OUTPUTS = Path(__file__).parents[1] / "outputs" / "bench"
SMOLLM2 = Path(__file__).parents[1] / ".cache" / "main_job" / "smollm2-1"
BACKENDS = ("equipoise fsdp2", "equipoise ddp")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and say where an engine of equipoise is behind; 0 unless something failed."""
    options = _parse(argv)
    console = Console()
    console.width = max(console.width, 120)
    os.environ.update(cpu_environment())
    # glibc gives large blocks back when they are freed, so that a peak is what an engine holds and not what it held
    os.environ.update(MALLOC_ARENA_MAX="2", MALLOC_MMAP_THRESHOLD_=str(3 << 20))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "engine.log").unlink(missing_ok=True)
    cores = len(os.sched_getaffinity(0))
    pairs: list[Pair] = []
    columns = (TextColumn("engines"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as made:
        case = _case(options, Path(made), console)
        with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
            cells = [(world, name) for world in options.ranks for name in options.engines]
            task = progress.add_task("", total=len(cells) * runs(options.repeats), completed=-1)
            for world, name in cells:
                threads = options.threads or max(1, cores // world)
                os.environ["OMP_NUM_THREADS"] = str(threads)
                pair = measure(
                    case,
                    name,
                    world=world,
                    threads=threads,
                    repeats=options.repeats,
                    log=options.out / "engine.log",
                    tick=lambda text: progress.update(task, advance=1, description=text),
                )
                pairs.append(pair)
            progress.update(task, description="", completed=len(cells) * runs(options.repeats))
    _tell(pairs, case, options, console)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny Llama instead of SmolLM2-135M: a minute")
    parser.add_argument("--engines", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="beside verl's")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="processes of each engine")
    parser.add_argument("--repeats", type=int, help="timed runs of each job and engine (5; quick: 6)")
    parser.add_argument("--tokens", type=int, help="of one update (2400; quick: 2000)")
    parser.add_argument("--rows", type=int, default=16, help="of one update")
    parser.add_argument("--cap", type=int, help="tokens of a micro-batch (800; quick: 600)")
    parser.add_argument("--threads", type=int, help="of each process (cores / ranks); 1 bears a busy machine best")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations; verl's default is not to")
    parser.add_argument("--attention", default="equipoise_varlen_cpu", help="of verl's model; 'sdpa' masks densely")
    parser.add_argument("--out", type=Path, default=OUTPUTS, help="folder of the results")
    options = parser.parse_args(argv)
    options.repeats = options.repeats or (6 if options.quick else 5)
    options.tokens = options.tokens or (2000 if options.quick else 2400)
    options.cap = options.cap or (600 if options.quick else 800)
    return options


def _case(options: argparse.Namespace, folder: Path, console: Console) -> EngineCase:
    if options.quick:
        model, vocabulary = folder, write_tiny_llama(folder)
    else:
        model, vocabulary = SMOLLM2, 49152
        if not model.exists():
            console.print("converting SmolLM2-135M, once (half a minute)", highlight=False)
            command = [sys.executable, "-W", "ignore", "-m", "examples.main_job.smollm2", str(model)]
            subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    return EngineCase(
        model=model,
        vocabulary=vocabulary,
        lengths=log_normal_lengths(options.rows, options.tokens, options.cap),
        max_token_len=options.cap,
        checkpointing=not options.no_checkpointing,
        attention=options.attention,
    )


def _tell(pairs: Sequence[Pair], case: EngineCase, options: argparse.Namespace, console: Console) -> None:
    model = "a Llama of 0.2 million parameters" if options.quick else "SmolLM2-135M"
    notes = [
        f"{model}, float32, {len(case.lengths)} rows of {min(case.lengths)} to {max(case.lengths)} tokens, "
        f"{case.num_tokens} in all, under a cap of {case.max_token_len}; activations "
        f"{'recomputed' if case.checkpointing else 'kept'}; AdamW, clipped PPO, token mean; verl's attention: "
        f"{case.attention}. {options.repeats} runs each, in turn (A B B A); ratios are medians of neighbouring runs, "
        "with least and most; after the semicolon the same by processor time, which a busy machine changes less.",
        engine_table.cut(pairs) + ".",
        engine_table.equality(pairs),
        "Peak: most resident memory of a rank above that after the engine was made and had run once; the update's "
        "holds optimizer states and gradients.",
    ]
    lines = [engine_table.report(pairs), *(f"- {note}" for note in notes), "", "Where equipoise is behind:", ""]
    lines += [f"- {line}" for line in engine_table.behind(pairs)] or ["Nowhere."]
    machine = baseline.machine()
    content = {"machine": machine, "pairs": [asdict(pair) for pair in pairs]}
    (options.out / "engine.json").write_text(json.dumps(content, indent=1))
    text = "\n".join(lines)
    (options.out / "engine.md").write_text(f"# Engines beside verl's\n\n{text}\n")
    console.print(Markdown(text))
    console.print(f"wrote engine.json and engine.md to {options.out}", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
