"""What every engine does, whatever it runs on: the life cycle, one pass over a batch, one optimizer step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict

from equipoise.errors import EquipoiseError, InvalidInput, must
from equipoise.planning.step.result import StepPlan
from equipoise.training.engine.config import EngineConfig, check_micro_batches
from equipoise.training.loss.metrics import AnyMetric

LossFunction = Callable[[dict[str, torch.Tensor], TensorDict, Any], tuple[torch.Tensor, Mapping[str, AnyMetric]]]
"""``(model_output, micro_batch, dp_group) -> (loss, metrics)``.

The outputs are jagged like the micro-batch's ``input_ids``; a value at token t is of the distribution that t was drawn
from, 0 at the first token of a row. The loss is this micro-batch's share times the data-parallel size
(:func:`equipoise.agg_loss` with ``dp_size`` and global counts), since the engine averages gradients over ranks.
"""


class WrongState(EquipoiseError, RuntimeError):
    """A method was called out of its turn."""


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """How one batch is run.

    Args:
        plan: where micro-batches come from; no collective then. None: by the engine's cap or fixed rows.
        mini_batch: which optimizer step of the plan the rows are; None for all the rank's rows.
        temperature: logits are divided by it.
        with_entropy: also output the entropy of each distribution.
        max_token_len_per_gpu: cap in place of the engine's settings, for this pass.
        micro_batch_size_per_gpu: fixed rows in place of the engine's settings, for this pass.
    """

    plan: StepPlan | None = None
    mini_batch: int | None = None
    temperature: float = 1.0
    with_entropy: bool = False
    max_token_len_per_gpu: int | None = None
    micro_batch_size_per_gpu: int | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise InvalidInput(must("temperature", "be above 0", self.temperature, "1.0 leaves logits as they are"))
        check_micro_batches(self.max_token_len_per_gpu, self.micro_batch_size_per_gpu)
        if self.mini_batch is not None and self.plan is None:
            raise InvalidInput(must("mini_batch", "be None without a plan", self.mini_batch, "pass plan="))


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineOutput:
    """What one batch gave.

    Attributes:
        loss: of the whole mini-batch, the same on every rank; None without a loss function.
        metrics: this rank's, merged over its micro-batches; ``reduce_metrics`` merges them over ranks.
        model_output: jagged columns ("log_probs", "entropy" or "values"), rows as in the batch.
        grad_norm: global norm before clipping; None where nothing was trained.
        stepped: False where the optimizer step was skipped.
    """

    loss: float | None
    metrics: dict[str, AnyMetric]
    model_output: TensorDict
    grad_norm: float | None = None
    stepped: bool = False


class BaseEngine(ABC):
    """A model, its optimizer, and how a batch goes through them on this rank.

    ``initialize`` comes first; ``train_batch`` runs within ``train_mode``, ``infer_batch`` within either mode. Data are
    this rank's rows: a TensorDict with jagged ``input_ids`` and what the loss function needs.

    Args:
        config: its settings.
        model: path, configuration or module, as the engine takes it.
    """

    def __init__(self, config: EngineConfig, model: Any) -> None:
        self.config = config
        self.source = model
        self.mode: Literal["train", "eval"] | None = None
        self.num_skipped_steps = 0

    @abstractmethod
    def initialize(self) -> None:
        """Make model, optimizer and groups. Every rank calls it."""

    @abstractmethod
    def to(self, device: str | torch.device, *, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and gradients, optimizer states, or both."""

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Switch dropout and the like on or off."""

    @property
    @abstractmethod
    def compute_device(self) -> torch.device:
        """Where forward and backward run."""

    @abstractmethod
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False, **options: Any
    ) -> EngineOutput:
        """Run all micro-batches of ``data``; gradients add up and, after the last, are those of the whole mini-batch.

        Args:
            data: this rank's rows.
            loss_function: see :data:`LossFunction`; None only with ``forward_only``.
            forward_only: no gradients.
            **options: fields of :class:`PassOptions`.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forget gradients."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip and step; skip, warn and count it in ``num_skipped_steps`` where there is nothing sound to learn from.

        Returns:
            Global gradient norm before clipping.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Go on to the next learning rate and return it."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Number of ranks that hold different rows."""

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Number of this rank among them."""

    @abstractmethod
    def get_data_parallel_group(self) -> Any:
        """Process group over which gradients of different rows are averaged."""

    @abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """True on the one rank of each data-parallel rank that reports outputs."""

    @abstractmethod
    def get_per_tensor_param(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Full tensors one by one, by the names that HF checkpoints use. Every rank must take all of them."""

    @abstractmethod
    def save_checkpoint(
        self,
        local_path: str | Path,
        *,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save model, optimizer, schedule and ``extra``; every rank calls it. A killed save harms no earlier one."""

    @abstractmethod
    def load_checkpoint(self, local_path: str | Path, *, global_step: int | None = None) -> dict[str, Any]:
        """Load the latest complete checkpoint, or that of a step, and return its ``extra``."""

    @contextmanager
    def train_mode(self) -> Generator[None, None, None]:
        """Training within the block; offloaded parameters and optimizer states are on the device there."""
        with self._mode("train"):
            yield

    @contextmanager
    def eval_mode(self) -> Generator[None, None, None]:
        """Inference within the block; offloaded parameters are on the device there."""
        with self._mode("eval"), torch.no_grad():
            yield

    def train_batch(self, data: TensorDict, loss_function: LossFunction, **options: Any) -> EngineOutput:
        """One optimizer step on the rows of one mini-batch.

        Args:
            data: this rank's rows; with a plan in its dispatch order (``plan.rank_rows(rank)``).
            loss_function: see :data:`LossFunction`.
            **options: fields of :class:`PassOptions`.

        Raises:
            WrongState: outside ``train_mode``.
        """
        self._must_be_in("train")
        self.optimizer_zero_grad()
        output = self.forward_backward_batch(data, loss_function, **options)
        skipped = self.num_skipped_steps
        grad_norm = self.optimizer_step()
        return replace(output, grad_norm=grad_norm, stepped=self.num_skipped_steps == skipped)

    def infer_batch(self, data: TensorDict, loss_function: LossFunction | None = None, **options: Any) -> EngineOutput:
        """Outputs of the rows, and their loss if there is a function for it; no gradients.

        Args:
            data: this rank's rows.
            loss_function: see :data:`LossFunction`.
            **options: fields of :class:`PassOptions`.

        Raises:
            WrongState: outside ``train_mode`` and ``eval_mode``.
        """
        self._must_be_in("train", "eval")
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True, **options)

    def _must_be_in(self, *modes: str) -> None:
        if self.mode not in modes:
            rule = f"be {' or '.join(repr(mode) for mode in modes)}"
            raise WrongState(must("mode", rule, self.mode, f"call it in `with engine.{modes[0]}_mode():`"))

    @contextmanager
    def _mode(self, mode: Literal["train", "eval"]) -> Generator[None, None, None]:
        if self.mode is not None:
            raise WrongState(must("mode", "be None when a mode is entered", self.mode, "leave the other block first"))
        model, optimizer = self.config.offload_params, mode == "train" and self.config.offload_optimizer
        self.to(self.compute_device, model=model, optimizer=optimizer)
        self.set_training(mode == "train")
        self.mode = mode
        try:
            yield
        finally:
            self.mode = None
            self.to("cpu", model=model, optimizer=optimizer)
