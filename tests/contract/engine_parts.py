"""Engines, rows and measurements for the scenarios of the contract."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

import equipoise as eq
from equipoise.errors import EquipoiseError
from equipoise.training.engine import BaseEngine, EngineConfig, EngineOutput, engines
from equipoise.training.loss.metrics import reduce_metrics
from tests.contract import engine_reference as ref

BACKENDS = ("ddp", "fsdp2")


MODELS = (("language_model", "llama"), ("value_model", "qwen2"), ("language_model", "qwen2"))


CUTS: dict[str, dict[str, Any]] = {
    "dynamic": {"max_token_len_per_gpu": ref.CAP},
    "one row": {"micro_batch_size_per_gpu": 1},
    "two rows": {"micro_batch_size_per_gpu": 2},
    "all rows": {"max_token_len_per_gpu": 1000},
    "planned": {},
}


FEWER = ("dynamic", "planned")


TRAINED = [
    (world, backend, kind, name, cut)
    for world in (1, 2)
    for backend in BACKENDS
    for kind, name in MODELS
    for cut in CUTS
    if cut in FEWER or (world == 2 and (kind, name) != MODELS[2])
]
"""What is trained on equal terms: every way of cutting on two ranks, two of them on one."""


ALL = tuple(range(len(ref.LENGTHS)))


def engine(
    backend: str, kind: str, name: str, *, dtype: str = "float64", optimizer: Any = ref.OPTIMIZER, **settings: Any
) -> BaseEngine:
    """A fresh engine from the registry; ranks other than 0 start from other weights, which rank 0's must replace."""
    config = EngineConfig(
        backend=backend, model_type=kind, device="cpu", dtype=cast(Any, dtype), optimizer=optimizer, **settings
    )
    made = engines.create(config, ref.hf_model(name, dtype, seed=dist.get_rank()))
    made.initialize()
    if kind == "value_model":
        _set_value_head(made)
    return made


def _set_value_head(made: Any) -> None:
    with torch.no_grad():
        for key, parameter in made.module.named_parameters():
            if key.startswith("score."):
                want = ref.value_head() if key == "score.weight" else torch.zeros(1, dtype=torch.float64)
                want = want.to(parameter.dtype)
                if hasattr(parameter, "full_tensor"):
                    from torch.distributed.tensor import distribute_tensor

                    want = distribute_tensor(want, parameter.device_mesh, parameter.placements)
                parameter.copy_(want)


def share(made: BaseEngine, numbers: tuple[int, ...] = ALL) -> list[int]:
    """Numbers of this rank's rows, as an even split in turn hands them out."""
    return list(numbers[made.get_data_parallel_rank() :: made.get_data_parallel_size()])


def planned(made: BaseEngine, numbers: tuple[int, ...] = ALL) -> tuple[list[int], eq.StepPlan]:
    """Numbers of this rank's rows by a plan."""
    lengths = [ref.LENGTHS[i] for i in numbers]
    spec = eq.StepSpec(dp_size=made.get_data_parallel_size(), max_token_len_per_gpu=ref.CAP)
    plan = eq.plan_step(lengths, spec)
    return [numbers[i] for i in plan.rank_rows(made.get_data_parallel_rank()).tolist()], plan


def said(output: EngineOutput, made: BaseEngine) -> dict[str, Any]:
    """Numbers of a step; metrics merged over ranks."""
    merged = reduce_metrics(output.metrics, group=made.get_data_parallel_group())
    return {
        "loss": output.loss,
        "norm": output.grad_norm,
        "stepped": output.stepped,
        "per_token": merged["per_token"].value,
        "count": float(cast(Any, merged["per_token"]).count),
    }


def rows_of(output: EngineOutput, numbers: list[int]) -> dict[int, dict[str, torch.Tensor]]:
    """Outputs by the number of their row."""
    columns = {str(name): cast(Any, column).unbind() for name, column in output.model_output.items()}
    return {i: {name: rows[at].clone() for name, rows in columns.items()} for at, i in enumerate(numbers)}


def weights(made: BaseEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in made.get_per_tensor_param()}


def trained(made: BaseEngine, *, plan: bool = False, steps: int = 2) -> dict[str, Any]:
    """Training steps on all rows, then a pass."""
    mine = share(made)
    options: dict[str, Any] = {}
    if plan:
        mine, made_plan = planned(made)
        options = {"plan": made_plan, "mini_batch": 0}
    loss = ref.CountingLoss(tokens=ref.num_tokens(ALL), dp_size=made.get_data_parallel_size())
    out: dict[str, Any] = {"initial": weights(made), "steps": []}
    data = ref.batch(mine)
    with made.train_mode():
        for _ in range(steps):
            out["steps"].append(said(made.train_batch(data, loss, **options), made))
            made.lr_scheduler_step()
    is_language = made.config.model_type == "language_model"
    with made.eval_mode():
        out["outputs"] = rows_of(made.infer_batch(data, with_entropy=is_language, **options), mine)
    out["weights"] = weights(made)
    out["reports"] = made.is_mp_src_rank_with_outputs()
    return out


def refused(action: Callable[[], Any]) -> str:
    """Text of the error; empty if there was none."""
    try:
        action()
    except EquipoiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def counted() -> Generator[list[int], None, None]:
    """How many collectives of small tensors this process asks for within the block."""
    calls = [0]
    inner = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast")}

    def call(*args: Any, _inner: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return _inner(*args, **kwargs)

    for name, function in inner.items():
        setattr(dist, name, partial(call, _inner=function))
    try:
        yield calls
    finally:
        for name, function in inner.items():
            setattr(dist, name, function)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
