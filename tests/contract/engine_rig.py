"""Every engine through the same scenarios, on 1, 2 and 4 gloo processes forked from one that has imported all.

Run as a program: ``python -m tests.contract.engine_rig OUT_DIR``. Ranks write what they saw to
``OUT_DIR/world<N>.<rank>.pt``; the tests compare. It never touches the process group of pytest.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.multiprocessing.spawn import start_processes

import equipoise as eq
from equipoise.errors import EquipoiseError
from equipoise.training.engine import BaseEngine, EngineConfig, EngineOutput, checkpoint, engines, prepare_micro_batches
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


def equality(out: dict[str, Any], world: int) -> None:
    for size, backend, kind, name, cut in TRAINED:
        if size == world:
            made = engine(backend, kind, name, **CUTS[cut])
            out[f"train/{backend}/{kind}/{name}/{cut}"] = trained(made, plan=cut == "planned")
    for backend in BACKENDS:
        made = engine(backend, "language_model", "llama", dtype="float32", max_token_len_per_gpu=ref.CAP)
        out[f"train/{backend}/float32"] = trained(made)


def variants(out: dict[str, Any]) -> None:
    """Settings that must change nothing."""
    base: dict[str, Any] = {"max_token_len_per_gpu": ref.CAP}
    cases: dict[str, dict[str, Any]] = {
        "offload": {"offload_params": True, "offload_optimizer": True},
        "sync at each": {"gradient_sync": "each"},
        "checkpointing": {"gradient_checkpointing": True},
        "no reshard": {"reshard_after_forward": False},
        "chunks": {"log_prob_chunk_tokens": 3},
        "bfloat16": {"dtype": "float32", "param_dtype": "bfloat16"},
    }
    for backend in BACKENDS:
        for case, settings in cases.items():
            out[f"variant/{backend}/{case}"] = trained(engine(backend, "language_model", "llama", **base, **settings))


def moves(out: dict[str, Any]) -> None:
    """Where offload sends parameters and optimizer states, mode by mode."""
    for backend in BACKENDS:
        made: Any = engine(
            backend, "language_model", "llama", max_token_len_per_gpu=64, offload_params=True, offload_optimizer=True
        )
        seen: list[Any] = []

        def to(device: Any, _inner: Any = made.to, _seen: list[Any] = seen, **what: bool) -> None:
            _seen.append((str(device), what))
            _inner(device, **what)

        made.to = to
        with made.train_mode():
            pass
        with made.eval_mode():
            pass
        out[f"moves/{backend}"] = seen


def zero_weight(out: dict[str, Any], world: int) -> None:
    """The last rank has one row, or none, where the others need more micro-batches."""
    for backend in BACKENDS:
        for kind, name in MODELS[:2]:
            for rows_of_last in (1, 0):
                made = engine(backend, kind, name, max_token_len_per_gpu=12, on_shortage="zero_weight")
                last = dist.get_rank() == world - 1
                mine = [6, 7][:rows_of_last] if last else [0, 1, 2, 3]
                everyone = (0, 1, 2, 3) * (world - 1) + (6, 7)[:rows_of_last]
                loss = ref.CountingLoss(tokens=ref.num_tokens(everyone), dp_size=world)
                data = ref.batch(mine)
                with made.train_mode():
                    output = made.train_batch(data, loss)
                case = f"zero_weight/{backend}/{kind}/{rows_of_last}"
                out[case] = {
                    **said(output, made),
                    "metrics": sorted(output.metrics),
                    "asked": loss.asked,
                    "rows": len(output.model_output),
                    "everyone": everyone,
                    "weights": weights(made),
                }


def skipped(out: dict[str, Any]) -> None:
    """A loss that is not finite, and a step in which no token counts."""
    for backend in BACKENDS:
        made = engine(backend, "language_model", "llama", max_token_len_per_gpu=ref.CAP)
        data, before = ref.batch(share(made)), weights(made)

        def broken(columns: Any, rows: Any, group: Any) -> Any:
            return columns["log_probs"].values().sum() * float("nan"), {}

        empty = masked_out(data)
        loss = ref.CountingLoss(tokens=0, dp_size=made.get_data_parallel_size())
        with warnings.catch_warnings(record=True) as heard, made.train_mode():
            warnings.simplefilter("always")
            nan = made.train_batch(data, broken)
            none = made.train_batch(empty, loss)
            said_so = [str(each.message) for each in heard if "skipped" in str(each.message)]
        out[f"skipped/{backend}"] = {
            "norms": (nan.grad_norm, none.grad_norm),
            "stepped": (nan.stepped, none.stepped),
            "warnings": said_so,
            "loss": none.loss,
            "before": before,
            "after": weights(made),
        }


def masked_out(data: Any) -> Any:
    """The same rows, none of whose tokens count."""
    empty = data.clone()
    mask = [torch.zeros_like(one) for one in data["loss_mask"].unbind()]
    empty["loss_mask"] = torch.nested.as_nested_tensor(mask, layout=torch.jagged)
    return empty


def empty_step_on_an_empty_rank(out: dict[str, Any]) -> None:
    made = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP, on_shortage="zero_weight")
    data = masked_out(ref.batch([0, 1])) if dist.get_rank() == 0 else ref.batch([])
    with warnings.catch_warnings(), made.train_mode():
        warnings.simplefilter("ignore")
        out["skipped/no rows"] = made.train_batch(data, ref.CountingLoss(tokens=0, dp_size=2)).stepped


def states(out: dict[str, Any]) -> None:
    """What is called out of its turn, and plans that are not the engine's."""
    made = engine("ddp", "language_model", "llama", max_token_len_per_gpu=ref.CAP)
    frozen = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP, optimizer=None)
    data, loss = ref.batch(ALL), ref.CountingLoss(tokens=1, dp_size=1)
    out["state/no mode"] = refused(lambda: made.train_batch(data, loss))
    with made.eval_mode():
        out["state/eval"] = refused(lambda: made.train_batch(data, loss))
        out["state/nested"] = refused(lambda: made.train_mode().__enter__())
    with frozen.train_mode():
        out["state/frozen"] = refused(lambda: frozen.train_batch(data, loss))
        out["state/frozen passes"] = len(frozen.infer_batch(data).model_output)
    uncut = engine("ddp", "language_model", "llama")
    with uncut.eval_mode():
        out["state/uncut"] = refused(lambda: uncut.infer_batch(data))
    spec = eq.StepSpec(dp_size=1, max_token_len_per_gpu=2 * ref.CAP)
    wide = eq.plan_step(ref.LENGTHS, spec)
    other = eq.plan_step(ref.LENGTHS, eq.StepSpec(dp_size=2, max_token_len_per_gpu=ref.CAP))
    with made.train_mode():
        out["state/cap"] = refused(lambda: made.train_batch(data, loss, plan=wide))
        out["state/ranks"] = refused(lambda: made.train_batch(data, loss, plan=other))
        mixed = eq.plan_step([*ref.LENGTHS[::-1]], eq.StepSpec(dp_size=1, max_token_len_per_gpu=ref.CAP))
        out["state/other rows"] = refused(lambda: made.train_batch(data, loss, plan=mixed))
        loose = engine("ddp", "language_model", "llama", max_token_len_per_gpu=8, oversize="alone")
        spec = eq.StepSpec(dp_size=1, max_token_len_per_gpu=8, oversize="alone")
        with warnings.catch_warnings(), loose.train_mode():
            warnings.simplefilter("ignore")
            alone = eq.plan_step(ref.LENGTHS, spec)
            rows = ref.batch(alone.rank_rows(0).tolist())
            out["state/alone"] = loose.train_batch(rows, loss, plan=alone).stepped

        def detached(columns: Any, rows: Any, group: Any) -> Any:
            return torch.tensor(1.0), {}

        def number(columns: Any, rows: Any, group: Any) -> Any:
            return columns["log_probs"].values().sum(), {"kl": 1.0}

        def bare(columns: Any, rows: Any, group: Any) -> Any:
            return columns["log_probs"].values().sum()

        out["state/bare"] = refused(lambda: made.train_batch(data, bare))
        out["state/detached"] = refused(lambda: made.train_batch(data, detached))
        out["state/number"] = refused(lambda: made.train_batch(data, number))
        out["state/no loss"] = refused(lambda: made.forward_backward_batch(data, None))
        out["state/mini_batch"] = refused(lambda: made.train_batch(data, loss, mini_batch=0))
        out["state/temperature"] = refused(lambda: made.infer_batch(data, temperature=0.0))
    sharing: dict[str, Any] = {"max_token_len_per_gpu": ref.CAP, "sp_size": 2}
    out["state/sp"] = refused(lambda: engine("ddp", "language_model", "llama", **sharing))


def checkpoints(out: dict[str, Any], folder: Path, world: int) -> None:
    """Two steps, a save, two more; and from the save in a new engine the same two again, of either backend."""
    for backend, kind, name in (("ddp", "language_model", "llama"), ("fsdp2", "value_model", "qwen2")):
        root = folder / f"checkpoint-{backend}-{world}"
        made = engine(backend, kind, name, max_token_len_per_gpu=ref.CAP)
        loss = ref.CountingLoss(tokens=ref.num_tokens(ALL), dp_size=made.get_data_parallel_size())
        data = ref.batch(share(made))

        def steps(made: BaseEngine, data: Any = data, loss: Any = loss) -> list[dict[str, Any]]:
            seen: list[dict[str, Any]] = []
            with made.train_mode():
                for _ in range(2):
                    seen.append(said(made.train_batch(data, loss), made))
                    made.lr_scheduler_step()
            return seen

        before = f"{root}-before"
        made.save_checkpoint(before)
        steps(made)
        made.load_checkpoint(before)  # back to before the first step, from after the second
        out[f"checkpoint/{backend}/again"] = {"steps": steps(made), "weights": weights(made)}
        made.save_checkpoint(root, global_step=2, extra={"seen": torch.tensor([3, 1]), "epoch": 1})
        on = {"steps": steps(made), "weights": weights(made)}
        resumed: dict[str, Any] = {}
        for other in BACKENDS:
            again = engine(other, kind, name, max_token_len_per_gpu=ref.CAP)
            extra = again.load_checkpoint(root)
            resumed[other] = {"extra": extra, "steps": steps(again), "weights": weights(again)}
        out[f"checkpoint/{backend}"] = {"on": on, "resumed": resumed}
    made = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP)
    root = folder / f"kept-{world}"
    for step in (1, 2, 3, 3):
        made.save_checkpoint(root, global_step=step, max_ckpt_to_keep=2)
    dist.barrier()
    out["checkpoint/kept"] = sorted(path.name for path in root.iterdir()), (root / "latest").read_text()
    out["checkpoint/errors"] = refused(lambda: made.load_checkpoint(root, global_step=9))


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


def micro_batches(out: dict[str, Any], rank: int, world: int) -> None:
    """Agreement of two ranks on a count, and on errors that only one of them has."""
    group = dist.group.WORLD

    def lengths(first: list[int], other: list[int]) -> Any:
        mine = first if rank == 0 else other
        if not mine:
            return TensorDict({}, batch_size=[0])
        ids = torch.nested.as_nested_tensor([torch.arange(n) for n in mine], layout=torch.jagged)
        return TensorDict({"input_ids": ids}, batch_size=[len(mine)])

    def sizes(cut: Any) -> list[list[int]]:
        return [rows.tolist() for rows in cut.indices]

    with counted() as calls:
        c1 = prepare_micro_batches(lengths([95] * 5, [20] * 5), max_token_len=100, group=group)
    out["C1"] = {"indices": sizes(c1), "collectives": calls[0]}
    out["C1/no group"] = refused(lambda: prepare_micro_batches(lengths([95], [20]), max_token_len=100))
    c2 = lengths([9] * 4, [2] * 2)
    out["C2/error"] = refused(lambda: prepare_micro_batches(c2, max_token_len=10, group=group))
    filled = prepare_micro_batches(c2, max_token_len=10, on_shortage="zero_weight", group=group)
    out["C2/zero_weight"] = {"indices": sizes(filled), "rows": [len(one) for one in filled.batches]}
    b3 = lengths([4097, 5], [5, 5])
    out["B3/error"] = refused(lambda: prepare_micro_batches(b3, max_token_len=4096, group=group))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = prepare_micro_batches(b3, max_token_len=4096, oversize="alone", group=group)
    out["B3/alone"] = sizes(alone)
    odd = lengths([3] * 4, [3] * 3)
    out["H6/odd"] = refused(lambda: prepare_micro_batches(odd, max_token_len=8, force_group_size=2, group=group))
    out["fixed"] = refused(lambda: prepare_micro_batches(odd, micro_batch_size=2, group=group))
    nothing = lengths([3], [3])
    if rank == world - 1:
        del nothing["input_ids"]
    out["malformed"] = refused(lambda: prepare_micro_batches(nothing, max_token_len=8, group=group))
    cap = 8 if rank == 0 else 9
    out["settings"] = refused(lambda: prepare_micro_batches(lengths([3], [3]), max_token_len=cap, group=group))
    empty = lengths([9, 9], [])
    out["empty"] = sizes(prepare_micro_batches(empty, max_token_len=10, on_shortage="zero_weight", group=group))
    plan = eq.plan_step([5, 4, 3, 2], eq.StepSpec(dp_size=world, max_token_len_per_gpu=5))
    data = lengths([1] * 2, [1] * 2)
    with counted() as calls:
        by_plan = prepare_micro_batches(data, plan=plan, group=group)
    out["planned"] = {"indices": sizes(by_plan), "collectives": calls[0]}


def sequence_parallel(out: dict[str, Any]) -> None:
    for backend in BACKENDS:
        for kind, name in MODELS[:2]:
            settings: dict[str, Any] = {"max_token_len_per_gpu": ref.CAP // 2, "sp_size": 2}
            out[f"sp2/{backend}/{kind}/{name}"] = trained(engine(backend, kind, name, **settings))


LAYOUTS = {
    1: (("fsdp2", 1, "one row", 0),),
    4: (("ddp", 4, "dynamic", 4), ("fsdp2", 2, "one row", 2), ("ddp", 1, "dynamic", 0)),
}
"""By world: backend, data-parallel size (the other ranks share rows), cut, padding rows."""


def layouts_of(step: int, world: int) -> list[Any]:
    """Those in which the policy loss of this number is run: two of three, in turn."""
    return [layout for at, layout in enumerate(LAYOUTS[world]) if world == 1 or at != step % 3]


def losses(out: dict[str, Any], world: int) -> None:
    """Every policy loss in every mode that it goes with: a step that moves nothing, so that all start alike."""
    still = replace(ref.OPTIMIZER, lr=0.0, weight_decay=0.0, warmup_steps=0)
    for layout in LAYOUTS[world]:
        backend, dp_size, cut, num_padding = layout
        settings: dict[str, Any] = (
            CUTS[cut] if cut == "one row" else {"max_token_len_per_gpu": -(-ref.CAP * dp_size // world)}
        )
        made = engine(backend, "language_model", "llama", optimizer=still, sp_size=world // dp_size, **settings)
        mine = share(made)
        data = ref.policy_batch(mine, num_padding // dp_size)
        count = eq.LossDenominators.of(
            data["loss_mask"], is_padding=data["is_padding"], group=made.get_data_parallel_group()
        )
        case = f"losses/{backend}/{dp_size}"
        for step, (name, mode) in enumerate(ref.POLICY_STEPS):
            if layout not in layouts_of(step, world):
                continue
            loss = ref.PolicyStep(name=name, mode=mode, denominators=count, dp_size=dp_size)
            with made.train_mode():
                output = made.train_batch(data, loss, with_entropy=True)
            merged = reduce_metrics(output.metrics, group=made.get_data_parallel_group())
            out[f"{case}/{name}/{mode}"] = {
                "loss": output.loss,
                "norm": output.grad_norm,
                **{key: metric.value for key, metric in merged.items()},
            }


def from_folder(out: dict[str, Any], folder: Path) -> None:
    """A model on disk: under fsdp2 rank 0 alone reads the weights."""
    for backend in BACKENDS:
        config = EngineConfig(backend=backend, device="cpu", dtype="float64", max_token_len_per_gpu=ref.CAP)
        made = engines.create(config, folder / "model")
        made.initialize()
        out[f"folder/{backend}"] = weights(made)


def scenarios(rank: int, world: int, folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if world == 4:
        sequence_parallel(out)
        losses(out, world)
        return out
    equality(out, world)
    skipped(out)
    checkpoints(out, folder, world)
    if world == 1:
        moves(out)
        states(out)
        losses(out, world)
        return out
    variants(out)
    sequence_parallel(out)
    zero_weight(out, world)
    empty_step_on_an_empty_rank(out)
    micro_batches(out, rank, world)
    from_folder(out, folder)
    return out


def main(rank: int, world: int, folder: str, port: int) -> None:
    """One rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    torch.save(scenarios(rank, world, Path(folder)), f"{folder}/world{world}.{rank}.pt")
    dist.destroy_process_group()


STAGES = ("while writing", "before the rename", "before the pointer")


def killed(stage: str, folder: str) -> None:
    """Save a first checkpoint, then die within the save of the second."""
    root = Path(folder) / f"killed-{STAGES.index(stage)}"
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("gloo")
    made = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP)
    loss = ref.CountingLoss(tokens=ref.num_tokens(ALL), dp_size=1)
    made.save_checkpoint(root, global_step=1, extra={"step": 1})
    torch.save(weights(made), root.with_suffix(".pt"))
    with made.train_mode():
        made.train_batch(ref.batch(ALL), loss)

    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if stage == "while writing":
        os.fsync = _after(2, os.fsync, die)
    elif stage == "before the rename":
        Path.rename = die
    else:
        Path.replace = die
    made.save_checkpoint(root, global_step=2, extra={"step": 2})


def _after(calls: int, inner: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    left = [calls]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return then() if left[0] < 0 else inner(*args, **kwargs)

    return call


def resume_killed(stage: str, folder: str) -> None:
    """Load what is left, save once more and load that."""
    root = Path(folder) / f"killed-{STAGES.index(stage)}"
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("gloo")
    made = engine("fsdp2", "language_model", "llama", max_token_len_per_gpu=ref.CAP)
    found: dict[str, Any] = {"there": sorted(path.name for path in root.iterdir())}
    found["extra"] = made.load_checkpoint(root)
    found["weights"] = weights(made)
    made.save_checkpoint(root, global_step=2, extra={"step": 2})
    found["then"] = made.load_checkpoint(root)
    found["latest"] = checkpoint.find(root).name
    found["left"] = sorted(path.name for path in root.iterdir())
    torch.save(found, f"{root}.resumed.pt")


def forked(target: Callable[..., None], *args: Any) -> int:
    """Exit status of ``target`` in a process of its own."""
    pid = os.fork()
    if pid == 0:
        target(*args)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    where = sys.argv[1]
    torch.set_num_threads(1)
    ref.hf_model("llama").save_pretrained(f"{where}/model")
    for name in ("equipoise.training.engine.ddp", "equipoise.training.engine.fsdp2"):
        __import__(name)
    for size in (1, 2, 4):
        start_processes(main, args=(size, where, free_port()), nprocs=size, start_method="fork")
    deaths = {stage: forked(killed, stage, where) for stage in STAGES}
    for stage in STAGES:
        forked(resume_killed, stage, where)
    torch.save(deaths, f"{where}/deaths.pt")
