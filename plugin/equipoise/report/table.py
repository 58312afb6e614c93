"""The comparison as a table and a few lines of text."""

from __future__ import annotations

import numpy as np
from rich import box
from rich.table import Table

from equipoise.report.compare import Comparison


def table(comparison: Comparison) -> Table:
    """Mean over seeds (± standard deviation) of each contestant."""
    setting = comparison.setting
    seeds = comparison.bound_s.size
    title = (
        f"{setting.num_ranks} ranks × {setting.requests_per_rank} requests, {setting.places} at once, "
        f"check every {setting.check_interval} steps, {seeds} seeds"
    )
    found = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    found.add_column("policy", no_wrap=True)
    for head in ("seconds", "saved", "moves", "KV GB", "exchanges s", "idle", "plan ms"):
        found.add_column(head, justify="right", no_wrap=True)
    base = comparison.seconds(next(iter(comparison.outcomes)))
    for name, outcomes in comparison.outcomes.items():
        seconds = comparison.seconds(name)
        plans = [ms for outcome in outcomes for ms in outcome.plan_ms]
        moves = float(np.mean([outcome.moves for outcome in outcomes]))
        found.add_row(
            name,
            f"{seconds.mean():.0f} ± {seconds.std():.0f}",
            f"{100 * float(np.mean(1 - seconds / base)):.1f} %",
            f"{moves:.0f}",
            f"{comparison.kv_bytes(name).mean() / 1e9:.1f}",
            f"{np.mean([outcome.exchange_s for outcome in outcomes]):.2f}",
            f"{100 * float(np.mean([outcome.idle_share for outcome in outcomes])):.1f} %",
            f"{np.median(plans):.1f}" if plans else "",
            style="bold" if name == "ours" else None,
        )
    if not np.isnan(comparison.bound_s).any():
        saved = 100 * float(np.mean(1 - comparison.bound_s / base))
        found.add_row("bound: even at every step", f"{comparison.bound_s.mean():.0f}", f"{saved:.1f} %", style="dim")
    return found


def summary(comparison: Comparison) -> list[str]:
    """Sentences that compare ours with the recipe and with no moves."""
    ours, recipe = comparison.seconds("ours"), comparison.seconds("recipe")
    bytes_ours, bytes_recipe = comparison.kv_bytes("ours"), comparison.kv_bytes("recipe")
    lines = [f"Ours against the recipe: {_change(ours, recipe)} time, {_change(bytes_ours, bytes_recipe)} KV bytes."]
    apart, bytes_apart = comparison.seconds("recipe, siblings apart"), comparison.kv_bytes("recipe, siblings apart")
    lines.append(
        f"Against the recipe's policy with siblings apart too: {_change(ours, apart)} time,"
        f" {_change(bytes_ours, bytes_apart)} KV bytes."
    )
    pairs = (("ours, planner only", "no moves, tiers"), ("ours", "no moves, siblings apart"))
    slower = sum(
        int((comparison.seconds(moving) > comparison.seconds(still) * (1 + 1e-9)).sum()) for moving, still in pairs
    )
    lines.append(f"Seeds in which moving was slower than not moving: {slower} of {2 * ours.size}.")
    return lines


def _change(
    new: np.ndarray[tuple[int], np.dtype[np.float64]], old: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> str:
    if not old.mean():
        return "no"
    return f"{100 * (float(new.mean()) / float(old.mean()) - 1):+.1f} %"
