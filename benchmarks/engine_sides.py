"""Each engine behind one interface: passes for log-probs, and PPO updates with a token mean."""

# verl is not typed.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

import equipoise as eq
from benchmarks.engine_case import PROMPT, EngineCase

MAX_GRAD_NORM = 1.0


class Side(ABC):
    """One engine with this rank's rows.

    Args:
        case: what is run.
        numbers: this rank's rows.
    """

    def __init__(self, case: EngineCase, numbers: list[int]) -> None:
        self.case = case
        self.rows = [case.row(number) for number in numbers]

    @abstractmethod
    def initialize(self) -> None:
        """Build the engine."""

    @abstractmethod
    def log_probs(self, *, entropy: bool) -> list[torch.Tensor]:
        """Log-probs of the tokens of each row's response."""

    @abstractmethod
    def set_old_log_probs(self, rows: list[torch.Tensor]) -> None:
        """Make the batch of the updates."""

    @abstractmethod
    def update(self) -> dict[str, float]:
        """Forward, backward and optimizer step: "loss", "grad_norm" and the "micro_batches" of this rank."""


class Ours(Side):
    """An engine of equipoise."""

    def __init__(self, case: EngineCase, numbers: list[int], *, backend: str) -> None:
        super().__init__(case, numbers)
        self.backend = backend

    def initialize(self) -> None:
        """Build the engine from the registry."""
        config = eq.EngineConfig(
            backend=self.backend,
            device="cpu",
            max_token_len_per_gpu=self.case.max_token_len,
            gradient_checkpointing=self.case.checkpointing,
            optimizer=eq.OptimizerConfig(lr=self.case.lr, max_grad_norm=MAX_GRAD_NORM),
        )
        self.engine = eq.engines.create(config, str(self.case.model))
        self.engine.initialize()
        self.batch = self._batch("input_ids")

    def _batch(self, *names: str) -> TensorDict:
        columns = {name: _jagged([row[name] for row in self.rows]) for name in names}
        return TensorDict(columns, batch_size=[len(self.rows)])

    def log_probs(self, *, entropy: bool) -> list[torch.Tensor]:
        """One pass in ``eval_mode``."""
        with self.engine.eval_mode():
            found: Any = self.engine.infer_batch(self.batch, with_entropy=entropy).model_output["log_probs"]
        return [row[PROMPT:] for row in found.unbind()]

    def set_old_log_probs(self, rows: list[torch.Tensor]) -> None:
        """Add the columns of the loss."""
        for row, old in zip(self.rows, rows, strict=True):
            row["old_log_probs"] = torch.cat([torch.zeros(PROMPT), old])
        self.batch = self._batch("input_ids", "loss_mask", "advantages", "old_log_probs")

    def update(self) -> dict[str, float]:
        """Count the tokens over ranks, then one ``train_batch``."""
        group = self.engine.get_data_parallel_group()
        counts = eq.LossDenominators.of(self.batch["loss_mask"], group=group)
        calls = 0

        def loss(output: dict[str, torch.Tensor], rows: TensorDict, group: Any) -> Any:
            nonlocal calls
            calls += 1
            inputs = eq.PolicyInputs(
                log_prob=output["log_probs"],
                old_log_prob=rows["old_log_probs"],
                advantages=rows["advantages"],
                loss_mask=rows["loss_mask"],
            )
            dp_size = self.engine.get_data_parallel_size()
            return eq.policy_loss("ppo", inputs, denominators=counts, dp_size=dp_size)

        with self.engine.train_mode():
            output = self.engine.train_batch(self.batch, loss)
        assert output.loss is not None
        assert output.grad_norm is not None
        return {"loss": output.loss, "grad_norm": output.grad_norm, "micro_batches": calls}


class Verl(Side):
    """verl's FSDP2 engine with its own PPO loss, called as its training worker calls it."""

    def initialize(self) -> None:
        """Build the engine from verl's registry; what is not set here is verl's default."""
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine import EngineRegistry
        from verl.workers.utils.losses import ppo_loss

        self.engine: Any = EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model_config=HFModelConfig(
                path=str(self.case.model),
                load_tokenizer=False,
                override_config={"attn_implementation": self.case.attention},
                enable_gradient_checkpointing=self.case.checkpointing,
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            ),
            optimizer_config=FSDPOptimizerConfig(lr=self.case.lr, total_training_steps=1000, clip_grad=MAX_GRAD_NORM),
            checkpoint_config=CheckpointConfig(),
        )
        self.engine.initialize()
        self.loss = partial(
            ppo_loss,
            config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode="token-mean"),
        )
        self.batch = self._batch()

    def _batch(self, **more: list[torch.Tensor]) -> Any:
        from verl.utils import tensordict_utils as tu

        ids = [row["input_ids"] for row in self.rows]
        responses = {name: [row[name][PROMPT:] for row in self.rows] for name in ("loss_mask", "advantages")}
        columns = {
            "input_ids": ids,
            "position_ids": [torch.arange(row.numel()) for row in ids],
            "prompts": [row[:PROMPT] for row in ids],
            "responses": [row[PROMPT:] for row in ids],
            "response_mask": responses["loss_mask"],
            **responses,
            **more,
        }
        settings = {
            "temperature": 1.0,
            "use_remove_padding": True,
            "use_dynamic_bsz": True,
            "use_fused_kernels": False,
            "max_token_len_per_gpu": self.case.max_token_len,
            "global_batch_size": len(self.case.lengths),
        }
        return tu.get_tensordict({name: _jagged(rows) for name, rows in columns.items()}, non_tensor_dict=settings)

    def log_probs(self, *, entropy: bool) -> list[torch.Tensor]:
        """One pass in ``eval_mode``."""
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(self.batch, calculate_entropy=entropy)
        with self.engine.eval_mode():
            found = self.engine.infer_batch(self.batch)["model_output"]["log_probs"]
        return [row[PROMPT - 1 : -1] for row in found.unbind()]  # verl puts a token's value before it

    def set_old_log_probs(self, rows: list[torch.Tensor]) -> None:
        """Add the column of the loss."""
        self.batch = self._batch(old_log_probs=rows)

    def update(self) -> dict[str, float]:
        """One ``train_batch``, which counts the tokens over ranks itself."""
        with self.engine.train_mode():
            output = self.engine.train_batch(self.batch, loss_function=self.loss)
        losses = output["loss"]
        loss = torch.tensor(sum(losses), dtype=torch.float64)
        dist.all_reduce(loss)
        return {
            "loss": float(loss) / dist.get_world_size(),
            "grad_norm": output["metrics"]["grad_norm"],
            "micro_batches": len(losses),
        }


SIDES: dict[str, Callable[[EngineCase, list[int]], Side]] = {
    "verl fsdp2": Verl,
    "equipoise fsdp2": partial(Ours, backend="fsdp2"),
    "equipoise ddp": partial(Ours, backend="ddp"),
}
"""The engines by the names that tables give them."""


def _jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
