"""Where the ranks of the training room meet: the table, and what they do there."""

# tensordict and transformers are typed in part only.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers import LlamaConfig

import equipoise as eq
from equipoise.training.engine import (
    checkpoint,
    ddp,
    fsdp2,
    microbatches,
    models,
    packing,
    pass_options,
    passes,
    torch_engine,
)
from equipoise.training.loss import denominators, metrics
from tests.integration.together_rig import Meeting

LENGTHS = [5, 4, 6, 3, 5, 7]
BACKENDS = ("ddp", "fsdp2")


def meetings(*, planning: bool = False) -> dict[str, Meeting]:
    """The table; for a look at its rows alone, before there are ranks, ``planning``."""
    table = {
        "agreement: lengths": Meeting(run=_prepare, target=(microbatches, "token_lengths")),
        "agreement: columns": Meeting(run=_prepare, target=(microbatches, "cut_rows")),
        "agreement: settings": Meeting(run=_prepare, target=(microbatches.Ask, "of")),
        "denominators": Meeting(run=_denominators, target=(denominators, "sequences_of")),
        "metrics: kinds": Meeting(run=_reduce, target=(metrics, "_checked")),
        "metrics: sums": Meeting(run=_reduce, target=(metrics, "_vector")),
        "metrics: names that differ": Meeting(run=_differ, target=(metrics.json, "dumps")),
        "checkpoint: state": Meeting(run=_save, target=(Parts, "state")),
        "checkpoint: extra": Meeting(run=_save, target=(checkpoint, "_check_loadable"), first_only=True),
        "checkpoint: read back": Meeting(run=_save, target=(checkpoint, "read_extra"), first_only=True),
        "checkpoint: publish": Meeting(run=_save, target=(checkpoint, "_flush_folder"), first_only=True),
        "checkpoint: write": Meeting(run=_save, target=(FileSystemWriter, "write_data"), voted=False),
        "checkpoint: find": Meeting(run=_load, target=(checkpoint, "find")),
        "checkpoint: use": Meeting(run=_load, target=(Parts, "use")),
    }
    for backend in BACKENDS:
        table |= _of_engine(backend, planning=planning)
    return table


def _of_engine(backend: str, *, planning: bool) -> dict[str, Meeting]:
    made: Any = None
    if not planning:
        made = engine_of(backend)
        made.initialize()
    start = functools.partial(_initialize, backend)
    train, plan = functools.partial(_train, made), functools.partial(_train_by_plan, made)
    build = (models, "build") if backend == "ddp" else (fsdp2.FSDP2Engine, "_built")
    own = {
        # what fails inside torch's own collectives cannot be voted on
        "ddp": {"average gradients": Meeting(run=train, target=(ddp, "_buckets"), voted=False)},
        "fsdp2": {"norm": Meeting(run=train, target=(torch.nn.utils, "get_total_norm"), voted=False)},
    }
    forward = Meeting(run=train, target=(models.LanguageModel, "forward"), voted=backend == "ddp")
    table = {
        "device": Meeting(run=start, target=(torch_engine, "local_device")),
        "build": Meeting(run=start, target=build),
        "spread": Meeting(run=start, target=(torch_engine.dist, "broadcast"), voted=False),
        "optimizer": Meeting(run=start, target=(torch_engine, "optimizer_of")),
        "options": Meeting(run=train, target=(pass_options, "PassOptions")),
        "options with a plan": Meeting(run=plan, target=(torch_engine, "pass_options")),
        "rows of a plan": Meeting(run=plan, target=(torch_engine, "prepare_micro_batches")),
        "pack": Meeting(run=plan, target=(packing, "next_token_labels")),
        "forward": forward,
        "loss": Meeting(run=plan, target=(Parts, "share")),
        "loss without a plan": Meeting(run=train, target=(Parts, "share")),
        "count": Meeting(run=plan, target=(passes, "_num_counted")),
        "merge": Meeting(run=plan, target=(passes, "merge_metrics")),
        "rows of an inference": Meeting(
            run=functools.partial(_infer_by_plan, made), target=(torch_engine, "prepare_micro_batches")
        ),
        "outputs": Meeting(run=functools.partial(_infer_by_plan, made), target=(microbatches, "join_outputs")),
        **own[backend],
    }
    return {f"{backend}: {name}": meeting for name, meeting in table.items()}


class Parts:
    """What a user gives, where a test can make it fail."""

    @staticmethod
    def state() -> dict[str, Any]:
        return {"weight": torch.zeros(2)}

    @staticmethod
    def use(state: Any, counters: Any) -> None:
        pass

    @staticmethod
    def share(columns: Any, batch: Any) -> Any:
        return eq.agg_loss(columns["log_probs"], batch["loss_mask"], "token-sum"), {"n": eq.Metric(1, 1)}


def rows(numbers: list[int]) -> TensorDict:
    columns = {
        "input_ids": [torch.arange(LENGTHS[i]) for i in numbers],
        "loss_mask": [torch.ones(LENGTHS[i], dtype=torch.int64) for i in numbers],
    }
    jagged = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in columns.items()}
    return TensorDict(jagged, batch_size=[len(numbers)])


def engine_of(backend: str) -> Any:
    torch.manual_seed(0)
    config = eq.EngineConfig(backend=backend, device="cpu", max_token_len_per_gpu=8)
    model = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return eq.engines.create(config, model)


def _prepare(folder: Path) -> None:
    eq.prepare_micro_batches(rows([0, 1]), max_token_len=8, group=dist.group.WORLD)


def _denominators(folder: Path) -> None:
    eq.LossDenominators.of(torch.ones(2, 3), group=dist.group.WORLD)


def _reduce(folder: Path) -> None:
    eq.reduce_metrics({"a": eq.Metric(1, 1), "b": eq.Metric.max(2.0)}, group=dist.group.WORLD)


def _differ(folder: Path) -> None:
    """Names that differ are an error of their own, unless the exchange of the names fails."""
    try:
        eq.reduce_metrics({f"of {dist.get_rank()}": eq.Metric(1, 1)}, group=dist.group.WORLD)
    except eq.InvalidInput as error:
        if "'of 1'" not in str(error):
            raise


def _save(folder: Path) -> None:
    checkpoint.save(folder, lambda: Parts.state(), step=1, counters={})


def _load(folder: Path) -> None:
    _save(folder)
    checkpoint.load(
        folder,
        None,
        state=lambda _: {"weight": torch.ones(2)},
        use=lambda filled, counters: Parts.use(filled, counters),
    )


def _initialize(backend: str, folder: Path) -> None:
    engine_of(backend).initialize()


def _loss(columns: Any, batch: Any, group: Any) -> Any:
    return Parts.share(columns, batch)


def _train(engine: Any, folder: Path) -> None:
    with engine.train_mode():
        engine.train_batch(rows([0, 1, 2]), _loss)


def _planned() -> tuple[eq.StepPlan, TensorDict]:
    world = dist.get_world_size()
    numbers = [i % len(LENGTHS) for i in range(4 * world)]
    plan = eq.plan_step([LENGTHS[i] for i in numbers], eq.StepSpec(dp_size=world, max_token_len_per_gpu=8))
    return plan, rows([numbers[i] for i in plan.rank_rows(dist.get_rank()).tolist()])


def _train_by_plan(engine: Any, folder: Path) -> None:
    plan, mine = _planned()
    with engine.train_mode():
        engine.train_batch(mine, _loss, plan=plan, mini_batch=0)


def _infer_by_plan(engine: Any, folder: Path) -> None:
    plan, mine = _planned()
    with engine.eval_mode():
        engine.infer_batch(mine, plan=plan)
