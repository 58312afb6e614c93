"""The ``equipoise`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from equipoise import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="equipoise",
        description="Even work on every rank, the same loss on any cluster: step planning for RL post-training.",
        epilog="In verl: add +equipoise=default to the command line of verl.trainer.main_ppo.",
    )
    parser.add_argument("--version", action="version", version=f"equipoise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="check the installation in verl",
        description="Check versions, verl's plugin entry point, the Hydra group and the functions of verl that the hook"
        " replaces. Exit status 1 if something would keep Equipoise from running. Takes about 15 s: it imports verl.",
    )
    doctor.add_argument("--quiet", action="store_true", help="print only what is wrong")
    commands.add_parser("rollout-sim", help="simulate rollouts whose requests move between ranks", add_help=False)
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["rollout-sim"]:
        return _rollout_sim(given[1:])
    args = parser.parse_args(given)
    if args.command is None:
        parser.print_help()
        return 2
    from equipoise.trainer_hooks.on_verl.doctor import examine

    return examine(quiet=args.quiet)


def _rollout_sim(argv: list[str]) -> int:
    try:
        from equipoise.report.rollout_sim import main as simulate
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "matplotlib"):
            raise
        print(f"rollout-sim needs {error.name}: pip install 'equipoise[examples]'", file=sys.stderr)
        return 2
    return simulate(argv)
