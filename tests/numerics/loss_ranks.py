"""What two gloo ranks do: run in processes of their own by ``test_loss_ranks``."""

from __future__ import annotations

import datetime
import os
from typing import Any, cast

import torch
import torch.distributed as dist

import equipoise as eq
from equipoise.training.loss.metrics import AnyMetric
from tests.numerics.loss_plain import Settings
from tests.numerics.loss_rig import Layout, count, lay_out, make_rows, make_table, share, tensors

WORLD = 2
ROWS = 13
LAYOUT = Layout(dp_size=WORLD, cut="dynamic", padding=1, padding_mask=1, shuffled=3)
PAIRS = (("grpo", "token-mean"), ("gspo", "seq-mean-token-mean"), ("dr_grpo", "seq-mean-token-sum-norm"))


def run(rank: int, folder: str, num_threads: int = 1) -> None:
    """Join the group, do everything, leave the results in ``folder``."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(num_threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {
        "steps": {name: _step(rank, name, mode) for name, mode in PAIRS},
        "errors": [_refused(rank, case) for case in range(3)],
        "kinds": _kinds(rank),
        "calls": _collectives(rank),
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _step(rank: int, name: str, mode: str) -> tuple[float, Any, dict[str, float]]:
    group = dist.group.WORLD
    micro_batches = lay_out(make_rows(ROWS), LAYOUT)[rank]
    whole = tensors([row for micro in micro_batches for row in micro], "padded")
    counts = count(whole, group)
    table = torch.tensor(make_table(), dtype=torch.float64, requires_grad=True)
    loss = torch.zeros((), dtype=torch.float64)
    parts: list[dict[str, AnyMetric]] = []
    for micro in micro_batches:
        found, metrics = share(name, mode, tensors(micro, "padded"), table, Settings(), counts, WORLD)
        found.backward()
        loss += found.detach()
        parts.append(metrics)
    assert table.grad is not None
    for tensor in (loss, table.grad):  # what a data-parallel engine does
        dist.all_reduce(tensor, group=group)
        tensor /= WORLD
    reduced = eq.reduce_metrics(eq.merge_metrics(parts), group=group)
    gradient = cast("list[list[float]]", table.grad.tolist())
    return float(loss), gradient, eq.metric_values(reduced)


def _refused(rank: int, case: int) -> str:
    """Metrics on which the ranks do not agree: the error that this rank sees."""
    metrics: list[dict[str, Any]] = [
        {"a": eq.Metric(1, 1)} if rank else {"a": eq.Metric(1, 1), "b": eq.Metric(1, 1)},
        {"a": eq.Metric.max(1.0) if rank else eq.Metric(1, 1)},
        {"a": eq.Metric(1, 1) if rank else 3.0},
    ]
    try:
        eq.reduce_metrics(metrics[case], group=dist.group.WORLD)
    except eq.InvalidInput as error:
        return str(error)
    return ""


def _kinds(rank: int) -> dict[str, float]:
    metrics: dict[str, AnyMetric] = {
        "low": eq.Metric.min(3.0 - rank),
        "high": eq.Metric.max(torch.tensor(-5.0 - rank)),
        "mean": eq.Metric(100 * rank, 1 + 9 * rank),
        "none": eq.Metric(0, 0),
    }
    return {name: metric.value for name, metric in eq.reduce_metrics(metrics, group=dist.group.WORLD).items()}


def _collectives(rank: int) -> list[int]:
    """Elements of each all-reduce that a dictionary of forty metrics takes."""
    sizes: list[int] = []
    original = cast(Any, dist).all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    metrics: dict[str, AnyMetric] = {f"mean{i}": eq.Metric(rank, 1) for i in range(20)}
    metrics |= {f"max{i}": eq.Metric.max(rank) for i in range(12)} | {f"min{i}": eq.Metric.min(rank) for i in range(8)}
    dist.all_reduce = counted
    try:
        eq.reduce_metrics(metrics, group=dist.group.WORLD)
    finally:
        dist.all_reduce = original
    return sizes
