"""Optimizer steps of one process on a tiny model: which are taken, which are skipped, and what a failed pass leaves."""

# tensordict and transformers are typed in part only.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, LlamaConfig

import equipoise as eq

LENGTHS = [5, 4, 6, 3]
MODEL = LlamaConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
)


@pytest.fixture(params=["ddp", "fsdp2"])
def engine(request: pytest.FixtureRequest) -> Iterator[eq.BaseEngine]:
    torch.manual_seed(0)
    config = eq.EngineConfig(
        backend=request.param, device="cpu", max_token_len_per_gpu=8, optimizer=eq.OptimizerConfig(lr=0.1)
    )
    made = eq.engines.create(config, MODEL)
    made.initialize()
    try:
        yield made
    finally:
        dist.destroy_process_group()


def batch(counted: list[bool]) -> TensorDict:
    """Rows of which some have tokens that count."""
    ids = [torch.arange(n) + i for i, n in enumerate(LENGTHS)]
    masks = [torch.full((n,), int(counts)) for n, counts in zip(LENGTHS, counted, strict=True)]
    columns = {"input_ids": ids, "loss_mask": masks}
    jagged = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    return TensorDict(jagged, batch_size=[len(LENGTHS)])


def loss(columns: Any, rows: Any, group: Any) -> Any:
    return eq.agg_loss(columns["log_probs"], rows["loss_mask"], "token-sum"), {}


def flat(columns: Any, rows: Any, group: Any) -> Any:
    """A loss whose gradient is 0, as that of a group with equal rewards."""
    return columns["log_probs"].values().sum() * 0, {}


def weights(engine: eq.BaseEngine) -> torch.Tensor:
    return torch.cat([value.flatten().clone() for _, value in engine.get_per_tensor_param()])


def plan_of_two_steps() -> eq.StepPlan:
    spec = eq.StepSpec(dp_size=1, num_mini_batches=2, max_token_len_per_gpu=8)
    return eq.plan_step(LENGTHS, spec)


def test_a_mini_batch_without_a_counted_token_is_skipped_whatever_the_other_rows(engine: eq.BaseEngine) -> None:
    """Case P11 of the reported cases: all rows of the rank are given, and none of those of the mini-batch counts."""
    plan = plan_of_two_steps()
    second = {int(row) for part in plan.micro_batches(0)[1] for row in part}
    data = eq.reorder(batch([row not in second for row in range(4)]), plan.rank_rows(0))
    with engine.train_mode():
        assert engine.train_batch(data, loss, plan=plan, mini_batch=0).stepped
        before = weights(engine)
        with pytest.warns(eq.EquipoiseWarning, match="skipped"):
            done = engine.train_batch(data, loss, plan=plan, mini_batch=1)
    assert (done.stepped, done.grad_norm, engine.num_skipped_steps) == (False, 0.0, 1)
    assert torch.equal(weights(engine), before)


def test_a_gradient_of_zero_is_a_step_where_tokens_count(engine: eq.BaseEngine) -> None:
    """Weight decay and momentum go on."""
    before = weights(engine)
    with engine.train_mode():
        done = engine.train_batch(batch([True] * 4), flat)
    assert (done.stepped, done.grad_norm, engine.num_skipped_steps) == (True, 0.0, 0)
    assert not torch.equal(weights(engine), before)


@pytest.mark.parametrize("counted", [[True, False, False, False], [False] * 4])
def test_tokens_of_all_accumulated_passes_count(engine: eq.BaseEngine, counted: list[bool]) -> None:
    """The last pass alone, or one without gradients in between, says nothing of those before it."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(counted), flat)
        engine.forward_backward_batch(batch([False] * 4), flat)
        engine.infer_batch(batch([not any(counted)] * 4), flat)
        if any(counted):
            engine.optimizer_step()
        else:
            with pytest.warns(eq.EquipoiseWarning, match="skipped"):
                engine.optimizer_step()
    assert engine.num_skipped_steps == (0 if any(counted) else 1)


def test_padding_rows_do_not_count_whatever_their_mask(engine: eq.BaseEngine) -> None:
    data = batch([True] * 4)
    data["is_padding"] = torch.ones(4, dtype=torch.bool)
    with engine.train_mode(), pytest.warns(eq.EquipoiseWarning, match="skipped"):
        assert not engine.train_batch(data, flat).stepped


def test_a_batch_without_a_mask_counts(engine: eq.BaseEngine) -> None:
    data = batch([True] * 4)
    del data["loss_mask"]
    with engine.train_mode():
        assert engine.train_batch(data, flat).stepped


def test_gradients_that_nobody_has_counted_are_taken(engine: eq.BaseEngine) -> None:
    """Backward by other means than the engine's pass, even after a step that was skipped."""
    with engine.train_mode():
        with pytest.warns(eq.EquipoiseWarning, match="skipped"):
            engine.train_batch(batch([False] * 4), flat)
        for parameter in cast(Any, engine).module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine.optimizer_step()
    assert engine.num_skipped_steps == 1


def test_an_engine_initialized_again_starts_its_schedule_anew(engine: eq.BaseEngine) -> None:
    engine.config = replace(engine.config, optimizer=eq.OptimizerConfig(lr=0.1, warmup_steps=8))
    rates: list[list[float]] = []
    for _ in range(2):
        engine.initialize()
        rates.append([engine.lr_scheduler_step() for _ in range(3)])
    assert rates[0] == rates[1]
    assert rates[0][0] < rates[0][2]


def test_an_engine_initialized_again_has_counted_nothing(engine: eq.BaseEngine) -> None:
    with engine.train_mode():
        engine.forward_backward_batch(batch([False] * 4), flat)
    engine.initialize()
    with engine.train_mode():
        for parameter in cast(Any, engine).module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine.optimizer_step()
    assert engine.num_skipped_steps == 0


def test_outputs_have_the_precision_of_the_weights(engine: eq.BaseEngine) -> None:
    model: Any = AutoModelForCausalLM.from_config(MODEL)
    model.load_state_dict(dict(engine.get_per_tensor_param()))
    data = batch([True] * 4)
    with engine.eval_mode():
        columns: Any = engine.infer_batch(data).model_output["log_probs"]
    for got, ids in zip(columns.unbind(), data["input_ids"].unbind(), strict=True):
        scores = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(got[1:], expected, rtol=0, atol=2e-6)


class Unlucky(Exception):
    """Anything that a user's code may raise."""


@pytest.mark.parametrize("at", [1, 3])
def test_a_pass_that_fails_leaves_no_gradient(engine: eq.BaseEngine, at: int) -> None:
    calls: list[int] = []

    def luckless(columns: Any, rows: Any, group: Any) -> Any:
        calls.append(len(rows))
        if len(calls) == at:
            raise Unlucky("no luck today")
        return loss(columns, rows, group)

    with engine.train_mode():
        engine.optimizer_zero_grad()
        with pytest.raises(Unlucky, match="no luck today"):
            engine.forward_backward_batch(batch([True] * 4), luckless)
        assert len(calls) == at
        assert all(p.grad is None or not p.grad.any() for p in cast(Any, engine).module.parameters())
        assert engine.train_batch(batch([True] * 4), loss).stepped


def test_rows_that_cannot_be_packed_are_an_error_of_the_pass(engine: eq.BaseEngine) -> None:
    data = batch([True] * 4)
    data["position_ids"] = torch.zeros(4, 3, dtype=torch.int64)
    with engine.eval_mode(), pytest.raises(eq.InvalidInput, match="position_ids"):
        engine.infer_batch(data)
