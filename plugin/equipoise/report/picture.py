"""Tiers and running requests over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from equipoise.report.setting import Setting
from equipoise.report.simulation import SAMPLE_EVERY, Outcome


def draw(runs: Sequence[tuple[str, Outcome]], setting: Setting, out: Path) -> None:
    """One column per run over time: the group's tier above, running requests of each rank below."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(5.2 * len(runs), 5.6), layout="constrained")
    axes = figure.subplots(2, len(runs), sharex=True, sharey="row", height_ratios=[1, 2], squeeze=False)
    tiers = setting.step_time.tiers
    mesh = None
    for column, (title, run) in enumerate(runs):
        upper, lower = axes[0, column], axes[1, column]
        upper.step(run.second, run.tier, where="post", color="tab:red", linewidth=1.5)
        upper.set_title(f"{title}: {run.seconds:.0f} s, {run.moves} moves, {run.kv_bytes / 1e9:.0f} GB", fontsize=10)
        upper.set_yscale("log", base=2)
        upper.set_yticks(tiers, [str(tier) for tier in tiers])
        upper.minorticks_off()
        upper.grid(alpha=0.3)
        edges = np.append(run.second[::SAMPLE_EVERY][: len(run.active)], run.seconds)
        ranks = np.arange(setting.num_ranks + 1)
        mesh = lower.pcolormesh(
            edges, ranks, run.active.T, vmin=0, vmax=setting.places, cmap="viridis", rasterized=True
        )
        lower.set_xlabel("seconds")
    axes[0, 0].set_ylabel("decode tier")
    axes[1, 0].set_ylabel("rank")
    if mesh is not None:
        figure.colorbar(mesh, ax=axes[1, :].tolist(), label="running requests", pad=0.01)
    figure.savefig(out, dpi=110)
