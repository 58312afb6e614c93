"""What ``composition`` does to the optimizer steps: the lengths that each step sees, and what the step costs.

Run with ``python -m benchmarks.composition``; prints the table of ``docs/composition.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import get_args

import numpy as np

from benchmarks.lengths import draw
from equipoise import StepPlan, StepSpec, plan_step
from equipoise.planning.step.spec import Composition

DRAWN = ("lognormal", "bimodal", "thinking")
ROWS, DP_SIZE, STEPS = 1024, 16, 4
CAP = 32768


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One plan.

    Attributes:
        r: correlation of the number of a row's optimizer step and its length.
        lockstep_over_bound: lockstep cost over the bound of these mini-batches.
        lockstep_over_mean: lockstep cost over the mean cost of a rank, which is the same for every composition.

    """

    r: float
    lockstep_over_bound: float
    lockstep_over_mean: float


def correlation(plan: StepPlan, lengths: Sequence[int]) -> float:
    """Pearson's r of step number and length over all rows."""
    step = np.empty(len(lengths))
    for rank in range(plan.dp_size):
        for j, micro_batches in enumerate(plan.micro_batches(rank)):
            step[np.concatenate(micro_batches)] = j
    return float(np.corrcoef(step, np.asarray(lengths, dtype=np.float64))[0, 1])


def figures(length_set: str, composition: Composition, seed: int) -> Figures:
    """Plan one draw of ``ROWS`` rows."""
    lengths = draw(length_set, ROWS, seed)
    spec = StepSpec(
        dp_size=DP_SIZE, num_mini_batches=STEPS, max_token_len_per_gpu=CAP, composition=composition, seed=seed
    )
    plan = plan_step(lengths, spec)
    return Figures(
        r=correlation(plan, lengths.tolist()),
        lockstep_over_bound=plan.stats.lockstep_cost / plan.stats.bound,
        lockstep_over_mean=plan.stats.lockstep_cost / plan.stats.ideal,
    )


def table(num_seeds: int) -> list[str]:
    """Lines of a Markdown table, one row for each length set and composition."""
    lines = [
        "| lengths | composition | mean r | mean abs r | largest abs r | lockstep / bound | lockstep / mean |",
        "| :-- | :-- | --: | --: | --: | --: | --: |",
    ]
    for length_set in DRAWN:
        for composition in get_args(Composition):
            found = [figures(length_set, composition, seed) for seed in range(num_seeds)]
            r = [one.r for one in found]
            cells = [
                f"{mean(r):+.3f}",
                f"{mean(map(abs, r)):.3f}",
                f"{max(map(abs, r)):.3f}",
                f"{mean(one.lockstep_over_bound for one in found):.3f}",
                f"{mean(one.lockstep_over_mean for one in found):.3f}",
            ]
            lines.append(f"| {' | '.join([length_set, composition, *cells])} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="composition", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="draws of each length set")
    options = parser.parse_args(argv)
    print("\n".join(table(options.seeds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
