"""The command line of the simulation: ``equipoise rollout-sim``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from equipoise.errors import InvalidInput
from equipoise.report.compare import Comparison, compare
from equipoise.report.policies import Contestant, Ours, contestants
from equipoise.report.setting import LengthLaw, Setting
from equipoise.report.table import summary, table

_DESCRIPTION = """\
Simulate a rollout whose ranks decode in lockstep: every step costs the decode tier of the fullest rank. Compares no
moves, the policy of the CANN recipe (restated from its description) and plan_rebalance, on the same lengths. The
defaults are the recipe's setting: 128 ranks, 512 prompts × 16 responses, up to 32,768 tokens, tiers 64 to 4, a check
every 1000 steps.
"""
_EPILOG = """\
Response length = median × exp(between · z of the prompt + within · z of the response), z standard normal, clipped at
the longest. Step times: 125 to 200 ms at tier 64 as the fullest rank's KV cache grows to 90,000 tokens, 59 to 63 ms at
tier 4; those between are assumed. An exchange stops all ranks for latency + bytes of the busiest link / bandwidth.

examples:
  equipoise rollout-sim --quick
  equipoise rollout-sim --check-interval 10 100 1000 5000 --seeds 5
  equipoise rollout-sim --ranks 32 --requests 128 --slots 64 --out rollout.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and print it; returns the exit status."""
    options = _parse(argv)
    console = Console()
    console.width = max(console.width, 130)
    try:
        planner = Ours(victims=options.victims, kv_price=options.kv_price)
        law = _law(options)
        settings = [_setting(options, interval) for interval in options.check_interval]
    except InvalidInput as error:
        Console(stderr=True).print(f"rollout-sim: {error}", style="red", highlight=False, markup=False)
        return 2
    found: list[Comparison] = []
    entered = contestants(planner)
    with _progress(console) as progress:
        task = progress.add_task("simulate", total=len(settings) * options.seeds * len(entered))
        for setting in settings:
            found.append(compare(setting, law, entered, range(options.seeds), lambda: progress.advance(task)))
    for comparison in found:
        console.print(table(comparison))
        console.print(*summary(comparison), sep="\n", highlight=False)
    if options.out is not None:
        _draw(found[0], entered, options.out, console)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="equipoise rollout-sim",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    setting, law = Setting(), LengthLaw()
    add = parser.add_argument
    add("--quick", action="store_true", help="16 ranks × 32 requests, lengths up to 4096, 2 seeds: a second")
    add("--ranks", type=int, help=f"data-parallel ranks ({setting.num_ranks})")
    add("--requests", type=int, help=f"responses that each rank is asked for ({setting.requests_per_rank})")
    add("--slots", type=int, help="responses that a rank decodes at once; the others wait (all)")
    add("--seeds", type=int, help="draws of the lengths, from seed 0 on (20)")
    add("--check-interval", type=int, nargs="+", help=f"decode steps between checks ({setting.check_interval})")
    add("--median", type=float, default=law.median, help="of the response lengths (%(default)s)")
    add("--between", type=float, default=law.between, help="spread of log length between prompts (%(default)s)")
    add("--within", type=float, default=law.within, help="spread of log length within a prompt (%(default)s)")
    add("--longest", type=int, help=f"longest response ({law.longest})")
    add("--samples", type=int, default=law.samples, help="responses of a prompt (%(default)s)")
    add("--bandwidth", type=float, default=setting.bytes_per_s / 1e9, help="GB/s of a rank's link (%(default)s)")
    add("--latency", type=float, default=setting.latency_s, help="seconds of an exchange besides (%(default)s)")
    add("--recompute", action="store_true", help="receivers prefill what they get; no KV cache is sent")
    add("--prefill", type=float, default=setting.prefill_tokens_per_s, help="tokens/s of a prefill (%(default)s)")
    add("--victims", choices=("kv", "longest"), default=Ours.victims, help="which requests ours moves (%(default)s)")
    add("--kv-price", type=float, default=Ours.kv_price, help="seconds ours gives up to spare 1 GB (%(default)s)")
    add("--out", type=Path, help="PNG of tiers and running requests over time, before and after (first seed)")
    options = parser.parse_args(argv)
    quick = options.quick
    for name, usual in (
        ("ranks", 16 if quick else setting.num_ranks),
        ("requests", 32 if quick else setting.requests_per_rank),
        ("longest", 4096 if quick else law.longest),
    ):
        if getattr(options, name) is None:
            setattr(options, name, usual)
        elif getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.kv_price < 0:
        parser.error(f"--kv-price must be at least 0, got {options.kv_price}")
    options.seeds = 2 if quick and options.seeds is None else 20 if options.seeds is None else options.seeds
    options.check_interval = options.check_interval or [100 if quick else setting.check_interval]
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    return options


def _law(options: argparse.Namespace) -> LengthLaw:
    return LengthLaw(
        median=options.median,
        between=options.between,
        within=options.within,
        longest=options.longest,
        samples=options.samples,
    )


def _setting(options: argparse.Namespace, check_interval: int) -> Setting:
    return Setting(
        num_ranks=options.ranks,
        requests_per_rank=options.requests,
        slots=options.slots,
        check_interval=check_interval,
        bytes_per_s=options.bandwidth * 1e9,
        latency_s=options.latency,
        recompute=options.recompute,
        prefill_tokens_per_s=options.prefill,
    )


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def _draw(comparison: Comparison, entered: list[Contestant], out: Path, console: Console) -> None:
    from equipoise.report.picture import draw

    out.parent.mkdir(parents=True, exist_ok=True)
    chosen = {entered[0].name: "no moves, one decode shape", "recipe": "recipe", "ours": "ours"}
    draw([(title, comparison.outcomes[name][0]) for name, title in chosen.items()], comparison.setting, out)
    console.print(f"wrote {out}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
