"""What ranks of the rollout tests do: run in processes of their own by ``test_rollout_transfer``.

Two gloo ranks go through all scenarios one after the other and leave what they saw in ``OUT/<rank>.pt``.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import transformers

import equipoise as eq
from equipoise.rollout.decode import DecodeConfig, DecodeEngine
from equipoise.rollout.policy.moves import plan_rebalance
from equipoise.rollout.policy.requests import Move
from equipoise.rollout.transfer import RequestState, Sampling
from equipoise.rollout.transfer.channel import Channel
from equipoise.rollout.transfer.exchange import exchange
from equipoise.rollout.transfer.rebalancer import RebalancerConfig, RolloutRebalancer
from equipoise.rollout.transfer.tables import gather_tables
from tests.integration.gloo_ranks import join

VOCAB = 97
TIERS = (8, 4, 2)
TIMEOUT_S = 20.0


def model(*, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: Any = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(shape | changes)))
        return made.to(dtype)


def engine(*, num_blocks: int = 96, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> DecodeEngine:
    config = DecodeConfig(tiers=TIERS, num_blocks=num_blocks, block_size=8, chunk_tokens=32)
    return DecodeEngine(model(seed=seed, dtype=dtype, **changes), config)


def requests(rank: int, lengths: list[int], *, name: str = "q") -> list[RequestState]:
    """Greedy and sampled ones, with cuts and penalties, prompts of 1 to 40 tokens."""
    draw = random.Random(rank)
    made: list[RequestState] = []
    for index, length in enumerate(lengths):
        sampling = Sampling(
            seed=1000 * rank + index,
            temperature=0.0 if index % 3 == 0 else 0.8,
            top_k=20 if index % 4 == 1 else 0,
            top_p=0.9 if index % 5 == 2 else 1.0,
            repetition_penalty=1.2 if index % 4 == 2 else 1.0,
            presence_penalty=0.2 if index % 4 == 3 else 0.0,
            frequency_penalty=0.1 if index % 6 == 4 else 0.0,
            stop_token_ids=(5, 6) if index % 2 else (),
            max_tokens=length,
        )
        prompt = tuple(draw.randrange(VOCAB) for _ in range(1 + (7 * index) % 40))
        made.append(RequestState(id=f"{name}{rank}.{index}", prompt=prompt, sampling=sampling))
    return made


LENGTHS = ([42, 36, 48, 40, 45, 54, 38, 43, 37, 41, 46, 35], [4, 3, 5])
"""Skewed: rank 0 decodes long, and has more requests than slots; rank 1 is soon done."""


def shuffle_about(requests_by_rank: Any, **_: Any) -> list[Move]:
    """A planner that moves something at every check: the second request of the fullest rank goes to the other."""
    full = 0 if len(requests_by_rank[0]) >= len(requests_by_rank[1]) else 1
    held = [request for request in requests_by_rank[full] if request.running]
    return [Move(full, 1 - full, request.id) for request in held[1:3]]


def _results(done: list[RequestState]) -> list[Any]:
    return [(s.id, s.output, s.log_probs, s.finish_reason, s.home, s.index) for s in done]


def _generate(rank: int, *, dtype: torch.dtype = torch.float32, blocks: int = 96, **settings: Any) -> Any:
    planner: Any = settings.pop("planner", plan_rebalance)
    config = RebalancerConfig(check_interval=7, tiers=TIERS, timeout_s=TIMEOUT_S, profile_interval=1, **settings)
    runner = RolloutRebalancer(engine(num_blocks=blocks, dtype=dtype), None, config, planner=planner)
    done = runner.generate(requests(rank, LENGTHS[rank]))
    return {
        "results": _results(done),
        "metrics": runner.metrics(),
        "checks": [(c.step, c.running, c.waiting, c.tier, c.tier_unmoved, c.num_moved) for c in runner.checks],
        "free": runner.engine.facts().free_blocks,
        "blocks": runner.engine.facts().num_blocks,
    }


def _twice(rank: int) -> list[int]:
    """Two rollouts of one rebalancer, the second skewed the other way: results and moves of each."""
    config = RebalancerConfig(check_interval=7, tiers=TIERS, timeout_s=TIMEOUT_S, profile=False)
    runner = RolloutRebalancer(engine(), None, config)
    seen: list[int] = []
    for heavy in (0, 1):
        done = runner.generate(requests(rank, [12] * 6 if rank == heavy else [2], name=str(heavy)))
        seen += [len(done), sum(check.num_moved for check in runner.checks)]
    return seen


def _refusal(run: Callable[[], Any]) -> str:
    start = time.monotonic()
    try:
        run()
    except eq.EquipoiseError as error:
        assert time.monotonic() - start < TIMEOUT_S / 2
        return f"{type(error).__name__}: {error}"
    return ""


def _bad(rank: int, case: str) -> tuple[str, int]:
    """An input that is wrong on one rank: the error that this rank sees, and the steps that it decoded."""
    steps: list[Any] = []
    config = RebalancerConfig(check_interval=3, tiers=TIERS, timeout_s=TIMEOUT_S)
    if case == "settings" and rank == 1:
        config = RebalancerConfig(check_interval=4, tiers=TIERS, timeout_s=TIMEOUT_S)
    changes: dict[str, Any] = {"num_key_value_heads": 4} if case == "shape" and rank == 1 else {}
    made = engine(seed=rank if case == "weights" else 0, **changes)
    asked = requests(rank, [6, 6], name="x" if case != "id" else "")
    if case == "id":
        asked = [RequestState(id="same", prompt=(1,), sampling=Sampling())]
    if case == "long" and rank == 1:
        asked = requests(rank, [5000])
    if case == "breaks" and rank == 1:
        _break(made, "step", after=2)
    runner = RolloutRebalancer(made, None, config)
    text = _refusal(lambda: runner.generate(asked, on_step=steps.append))
    assert len(runner.unfinished) == len(asked)
    assert not made.num_unfinished
    return text, len(steps)


def _break(made: Any, name: str, *, after: int = 0) -> None:
    """Let a method of an engine fail, as one that is out of memory does, from call ``after`` on."""
    works, calls = getattr(made, name), 0

    def fail(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("out of memory")
        return works(*args)

    setattr(made, name, fail)


def _no_room(rank: int) -> dict[str, Any]:
    """A plan that gives a rank more than it can hold: the error, and that nothing moved; then one that fits."""
    made = engine(num_blocks=12 if rank else 96)
    asked = requests(rank, [30] * 8 if rank == 0 else [30])
    made.import_([replace(state, sampling=replace(state.sampling, stop_token_ids=())) for state in asked])
    for _ in range(10):
        made.step()
    channel = Channel(None, timeout_s=TIMEOUT_S)
    runner = RolloutRebalancer(made, None, RebalancerConfig(tiers=TIERS, timeout_s=TIMEOUT_S))
    before = made.list_requests()
    found = gather_tables(channel, runner.table)
    ids = [row.id for row in found[0].rows]
    all_of_them = [Move(0, 1, name) for name in ids]
    texts = [
        _refusal(lambda: exchange(made, channel, found, all_of_them, transfer="kv")),
        _refusal(lambda: exchange(made, channel, found, [Move(0, 1, "nobody")], transfer="kv")),
        _refusal(lambda: exchange(made, channel, found, [Move(0, 1, ids[0]), Move(0, 1, ids[0])], transfer="kv")),
        _refusal(lambda: exchange(made, channel, found, [Move(0, 2, ids[0])], transfer="kv")),
        _refusal(lambda: exchange(made, channel, found, [Move(0, 1, ids[0])], transfer="mail")),
    ]
    untouched = made.list_requests() == before
    done = exchange(made, channel, found, [Move(0, 1, ids[0])], transfer="kv")
    return {"texts": texts, "untouched": untouched, "moved": done.num_moved, "now": len(made.list_requests())}


def _refuses(rank: int, method: str) -> dict[str, Any]:
    """A rank whose engine refuses to send or to take: nothing moves, all is decoded once."""
    made = engine()
    if rank == (0 if method == "export" else 1):
        _break(made, method, after=1 if method == "reserve" else 0)
    config = RebalancerConfig(check_interval=7, tiers=TIERS, timeout_s=TIMEOUT_S, profile=False, transfer="kv")
    runner = RolloutRebalancer(made, None, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = runner.generate(requests(rank, LENGTHS[rank]))
    return {
        "results": _results(done),
        "refusals": runner.refusals,
        "warned": [str(w.message) for w in caught if issubclass(w.category, eq.EquipoiseWarning)],
        "free": made.facts().free_blocks,
    }


def run_two(rank: int, out: str) -> None:
    """All scenarios of two ranks."""
    join(rank, 2, out)
    results: dict[str, Any] = {
        "twice": _twice(rank),
        "still": _generate(rank, transfer="none"),
        "kv": _generate(rank, profile=False, transfer="kv"),
        "recompute": _generate(rank, profile=False, transfer="recompute"),
        "about": _generate(rank, profile=False, transfer="kv", planner=shuffle_about),
        "tight": _generate(rank, profile=False, transfer="kv", planner=shuffle_about, blocks=34),
        "timed": _generate(rank, transfer="kv"),
        "bfloat16 still": _generate(rank, dtype=torch.bfloat16, transfer="none"),
        "bfloat16": _generate(rank, dtype=torch.bfloat16, profile=False, transfer="kv"),
        "bad": {case: _bad(rank, case) for case in ("shape", "weights", "settings", "id", "long", "breaks")},
        "room": _no_room(rank),
        "export": _refuses(rank, "export"),
        "reserve": _refuses(rank, "reserve"),
    }
    torch.save(results, f"{out}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
