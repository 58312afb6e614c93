"""Arguments of the wrong kind: one error that names the argument, as for values out of range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

import equipoise as eq

SPEC = eq.StepSpec(dp_size=2, num_mini_batches=1, max_token_len_per_gpu=100)
BATCH = TensorDict({"input_ids": torch.zeros(2, 3)}, batch_size=[2])
ONES = torch.ones(2, 3)
ROWS = TensorDict({"input_ids": torch.nested.as_nested_tensor([torch.arange(3)], layout=torch.jagged)}, batch_size=[1])
CALLS: dict[str, Callable[[Any], Any]] = {
    "lengths": lambda bad: eq.plan_step(bad, SPEC),
    "spec": lambda bad: eq.plan_step([1, 2], bad),
    "cost": lambda bad: eq.plan_step([1, 2], SPEC, cost=bad),
    "is_padding": lambda bad: eq.plan_step([1, 2], SPEC, is_padding=bad),
    "k": lambda bad: eq.partition([1, 2, 3], bad),
    "capacity": lambda bad: eq.pack([1, 2, 3], capacity=bad),
    "dp_size": lambda bad: eq.required_batch_multiple(dp_size=bad),
    "mini_batch_sizes": lambda bad: eq.required_batch_multiple(dp_size=2, mini_batch_sizes=bad),
    "num_padding": lambda bad: eq.pad_batch(BATCH, bad, eos_token_id=0),
    "batch": lambda bad: eq.pad_batch(bad, 2, eos_token_id=0),
    "order": lambda bad: eq.reorder(BATCH, bad),
    "loss_mat": lambda bad: eq.agg_loss(bad, ONES, "token-mean"),
    "loss_mask": lambda bad: eq.agg_loss(ONES, bad, "token-mean"),
    "loss_agg_mode": lambda bad: eq.agg_loss(ONES, ONES, bad),
    "count": lambda bad: eq.Metric(1.0, bad),
    "ref_log_prob": lambda bad: eq.kl_penalty(ONES, bad, "k1"),
    "kind": lambda bad: eq.kl_penalty(ONES, ONES, bad),
    "max_token_len": lambda bad: eq.prepare_micro_batches(ROWS, max_token_len=bad),
}
NONE_IS_LEGAL = {"is_padding", "cost"}


@pytest.mark.parametrize("bad", ["many", [1.5], -1.5, None], ids=repr)
@pytest.mark.parametrize("name", list(CALLS))
def test_an_argument_of_the_wrong_kind_is_named(name: str, bad: Any) -> None:
    if name == "count" and bad == -1.5:
        bad = {}
    if name == "max_token_len" and bad is None:
        bad = True
    if bad is None and name in NONE_IS_LEGAL:
        CALLS[name](bad)
        return
    with pytest.raises(eq.EquipoiseError, match=rf"^{name}\b.*got .*"):
        CALLS[name](bad)


@pytest.mark.parametrize("bad", ["many", None, ONES], ids=str)
def test_micro_batches_are_cut_from_a_batch(bad: Any) -> None:
    with pytest.raises(eq.InvalidInput, match="batch"):
        eq.prepare_micro_batches(bad, max_token_len=5)


@pytest.mark.parametrize("name", ["lr", "max_grad_norm", "warmup_steps"])
@pytest.mark.parametrize("bad", ["many", [1], True], ids=repr)
def test_an_optimizer_setting_of_the_wrong_kind_is_named(name: str, bad: Any) -> None:
    with pytest.raises(eq.InvalidInput, match=rf"^{name}"):
        eq.OptimizerConfig(**{name: bad})


def test_a_request_takes_lists_and_refuses_other_kinds() -> None:
    how = eq.Sampling(max_tokens=3)
    state = eq.RequestState(id="a", prompt=[1, 2], sampling=how, output=[3], log_probs=[-0.5])  # type: ignore[arg-type]
    assert (state.tokens, state.log_probs) == ((1, 2, 3), (-0.5,))
    wrong: list[dict[str, Any]] = [{"id": 1}, {"prompt": "12"}, {"prompt": None}, {"sampling": {}}, {"output": 3}]
    for change in wrong:
        (name,) = change
        with pytest.raises(eq.InvalidInput, match=rf"^{name} of "):
            eq.RequestState(**cast(Any, {"id": "a", "prompt": (1,), "sampling": how, **change}))


def test_a_tensor_of_several_elements_is_no_size() -> None:
    with pytest.raises(eq.InvalidInput, match=r"dp_size.*\b1\b"):
        eq.required_batch_multiple(dp_size=ONES)  # type: ignore[arg-type]


def test_a_capacity_above_any_sum_is_no_limit() -> None:
    assert [group.tolist() for group in eq.pack([1, 2, 3], capacity=2**70)] == [[0, 1, 2]]


@pytest.mark.parametrize("cls", [eq.Sampling, eq.DecodeConfig, eq.RebalancerConfig, eq.TransformerCost])
@pytest.mark.parametrize("bad", [{"a": 1}, "many", [None]], ids=repr)
def test_a_setting_of_the_wrong_kind_is_named(cls: Any, bad: Any) -> None:
    for field in fields(cls):
        if field.type in ("bool", "tuple[tuple[int, float], ...]"):
            continue
        with pytest.raises(eq.EquipoiseError, match=rf"^{field.name}.*got .*"):
            cls(**{field.name: bad})
