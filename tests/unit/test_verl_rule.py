"""verl's rule as computed in one process, against verl's functions on real process groups."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false
# verl and torch.distributed are typed in part only.

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.multiprocessing.spawn import start_processes

from benchmarks.verl_rule import lockstep_cost, verl_micro_batches
from equipoise.errors import InfeasiblePlan, InvalidInput
from tests.integration.family import run_patiently

ROOT = Path(__file__).parents[2]
DP_SIZE = 2
CASES = 24


def draw(case: int) -> tuple[list[int], int, int]:
    """Lengths, mini-batches and cap; the tight caps make verl add micro-batches."""
    rng = random.Random(case)
    num_mini_batches = rng.choice((1, 2, 4))
    num_rows = DP_SIZE * num_mini_batches * rng.choice((2, 5, 8))
    lengths = [min(900, 1 + int(rng.lognormvariate(4.5, 1.0))) for _ in range(num_rows)]
    return lengths, num_mini_batches, max(lengths) + rng.choice((0, 1, 50, 1000))


def main(rank: int, rendezvous: str) -> None:
    """One rank: the real trainer method, then the real packing of this rank's mini-batches."""
    import torch
    import torch.distributed as dist
    from tensordict import TensorDict
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import seqlen_balancing

    rearrange_micro_batches: Any = seqlen_balancing.rearrange_micro_batches
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=DP_SIZE)
    group: Any = dist.group.WORLD
    results: list[Any] = []
    for case in range(CASES):
        lengths, num_mini_batches, cap = draw(case)
        batch = _Batch(lengths)
        trainer: Any = SimpleNamespace(
            actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": list(range(DP_SIZE))}),
            tokenizer=SimpleNamespace(eos_token_id=0),
            _get_required_batch_multiple=int,  # no padding: the multiple is the number of ranks
        )
        PPOTrainer._balance_batch(trainer, batch, {})  # pyright: ignore[reportArgumentType]
        size = len(lengths) // (DP_SIZE * num_mini_batches)
        mine = batch.order[rank * size * num_mini_batches :][: size * num_mini_batches]
        steps: list[Any] = []
        for start in range(0, len(mine), size):
            rows = mine[start : start + size]
            tokens = torch.nested.as_nested_tensor([torch.zeros(lengths[row]) for row in rows], layout=torch.jagged)
            try:
                _, groups = rearrange_micro_batches(
                    TensorDict({"input_ids": tokens}, batch_size=[size]), cap, dp_group=group
                )
            except ValueError:
                steps = ["infeasible"]
                break
            steps.append([[rows[i] for i in micro] for micro in groups])
        results.append(steps)
    Path(f"{rendezvous}.{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


class _Batch:
    """What the trainer's method asks of verl's ``KVBatchMeta``."""

    def __init__(self, lengths: list[int]) -> None:
        self.tags = [{"seq_len": length} for length in lengths]
        self.order = list(range(len(lengths)))

    def __len__(self) -> int:
        return len(self.order)

    def reorder(self, order: list[int]) -> None:
        self.order = [self.order[i] for i in order]


@pytest.mark.slow
def test_equals_verl_on_two_gloo_ranks(tmp_path: Path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.test_verl_rule", str(tmp_path / "meet")]
    run_patiently(command, cwd=ROOT, env={**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"})
    theirs = [json.loads((tmp_path / f"meet.{rank}.json").read_text()) for rank in range(DP_SIZE)]
    raised = added = 0
    for case in range(CASES):
        lengths, num_mini_batches, cap = draw(case)
        expected = [theirs[rank][case] for rank in range(DP_SIZE)]
        if ["infeasible"] in expected:
            raised += 1
            with pytest.raises(InfeasiblePlan):
                verl_micro_batches(lengths, dp_size=DP_SIZE, num_mini_batches=num_mini_batches, max_token_len=cap)
            continue
        ours = verl_micro_batches(lengths, dp_size=DP_SIZE, num_mini_batches=num_mini_batches, max_token_len=cap)
        assert ours == expected
        for step in zip(*ours, strict=True):
            floor = max(-(-sum(lengths[row] for micro in rank for row in micro) // cap) for rank in step)
            added += len(step[0]) > floor
    assert added > 0, "no case made verl go beyond the lower bound, so its loop over the count went untested"


def test_every_row_once_and_within_the_cap():
    lengths, num_mini_batches, _ = draw(3)
    cap = max(lengths) + 50
    plan = verl_micro_batches(lengths, dp_size=DP_SIZE, num_mini_batches=num_mini_batches, max_token_len=cap)
    micros = [micro for rank in plan for step in rank for micro in step]
    assert sorted(row for micro in micros for row in micro) == list(range(len(lengths)))
    assert max(sum(lengths[row] for row in micro) for micro in micros) <= cap


@pytest.mark.parametrize(("dp_size", "num_mini_batches"), [(2, 2), (0, 1), (1, 0), (3, 1)])
def test_rejects_rows_that_do_not_divide(dp_size: int, num_mini_batches: int):
    with pytest.raises(InvalidInput, match="dp_size"):
        verl_micro_batches([3, 2], dp_size=dp_size, num_mini_batches=num_mini_batches, max_token_len=8)


def test_rejects_a_row_above_the_cap():
    with pytest.raises(InfeasiblePlan, match="longest row, 9 tokens"):
        verl_micro_batches([9, 2], dp_size=2, num_mini_batches=1, max_token_len=8)


def test_lockstep_cost_takes_the_most_expensive_rank_at_each_micro_batch():
    plan = [[[[0], [1]]], [[[2], [3]]]]
    assert lockstep_cost(plan, [1, 2, 3, 4], linear=1.0, quadratic=0.0) == 3 + 4
    assert lockstep_cost(plan, [1, 2, 3, 4], linear=0.0, quadratic=2.0) == 2 * (9 + 16)


if __name__ == "__main__":
    importlib.import_module("verl.trainer.ppo.v1.trainer_base")  # once, for all ranks
    start_processes(main, args=(sys.argv[1],), nprocs=DP_SIZE, start_method="fork")
