"""Scenarios of training: equal on any cluster, zero-weight and skipped steps, every loss."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import equipoise as eq
from equipoise.training.loss.metrics import reduce_metrics
from tests.contract import engine_reference as ref
from tests.contract.engine_parts import BACKENDS, CUTS, MODELS, TRAINED, engine, said, share, trained, weights


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
