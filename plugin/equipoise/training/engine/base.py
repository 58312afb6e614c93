"""The interface of every engine: life cycle, a pass over a batch, an optimizer step."""

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

The outputs are jagged like the micro-batch's ``input_ids``; ``log_probs[t]`` scores token t and is 0 at the first token
of a row. The loss is this micro-batch's share times the data-parallel size (:func:`equipoise.agg_loss` with ``dp_size``
and global counts), because the engine averages gradients over ranks.
"""


class WrongState(EquipoiseError, RuntimeError):
    """A method was called in the wrong state."""


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """How to run a batch.

    Args:
        plan: source of the micro-batches, without a collective. None: use the engine's cap or fixed rows.
        mini_batch: the optimizer step of the plan that the rows belong to; None for all the rank's rows.
        temperature: divisor of the logits.
        with_entropy: also output the entropy of each distribution.
        max_token_len_per_gpu: cap for this pass, instead of the engine's settings.
        micro_batch_size_per_gpu: fixed rows for this pass, instead of the engine's settings.
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
    """The result of a batch.

    Attributes:
        loss: loss of the whole mini-batch, the same on every rank; None without a loss function.
        metrics: this rank's metrics, merged over its micro-batches; ``reduce_metrics`` merges them over ranks.
        model_output: jagged columns ("log_probs", "entropy" or "values"), in the batch's row order.
        grad_norm: global norm before clipping; None without training.
        stepped: False if the optimizer step was skipped.
    """

    loss: float | None
    metrics: dict[str, AnyMetric]
    model_output: TensorDict
    grad_norm: float | None = None
    stepped: bool = False


class BaseEngine(ABC):
    """A model and its optimizer on this rank.

    Call ``initialize`` first; ``train_batch`` runs within ``train_mode``, ``infer_batch`` within either mode. Data are
    this rank's rows: a TensorDict with jagged ``input_ids`` and what the loss function needs.

    Args:
        config: the engine's settings.
        model: path, configuration or module, as the engine accepts.
    """

    def __init__(self, config: EngineConfig, model: Any) -> None:
        self.config = config
        self.source = model
        self.mode: Literal["train", "eval"] | None = None
        self.num_skipped_steps = 0

    @abstractmethod
    def initialize(self) -> None:
        """Build model, optimizer and groups; every rank must call it."""

    @abstractmethod
    def to(self, device: str | torch.device, *, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and gradients, optimizer states, or both."""

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Switch between training and evaluation behavior, such as dropout."""

    @property
    @abstractmethod
    def compute_device(self) -> torch.device:
        """The device of forward and backward."""

    @abstractmethod
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False, **options: Any
    ) -> EngineOutput:
        """Run all micro-batches of ``data``; after the last one, gradients are those of the whole mini-batch.

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
        """Clip and step, or skip the step with a warning and count it in ``num_skipped_steps``.

        Returns:
            Global gradient norm before clipping.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the learning-rate schedule and return the new rate."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Number of ranks with different rows."""

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Index of this rank among them."""

    @abstractmethod
    def get_data_parallel_group(self) -> Any:
        """Process group over which gradients of different rows are averaged."""

    @abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """True on the one rank of each data-parallel rank that reports outputs."""

    @abstractmethod
    def get_per_tensor_param(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Full tensors one by one, under the names of HF checkpoints; every rank must consume all of them."""

    @abstractmethod
    def save_checkpoint(
        self,
        local_path: str | Path,
        *,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save model, optimizer, schedule and ``extra``; every rank must call it. A killed save harms nothing."""

    @abstractmethod
    def load_checkpoint(self, local_path: str | Path, *, global_step: int | None = None) -> dict[str, Any]:
        """Load the latest complete checkpoint, or the one of a step, and return its ``extra``."""

    @contextmanager
    def train_mode(self) -> Generator[None, None, None]:
        """Context for training; offloaded parameters and optimizer states are on the device within it."""
        with self._mode("train"):
            yield

    @contextmanager
    def eval_mode(self) -> Generator[None, None, None]:
        """Context for inference; offloaded parameters are on the device within it."""
        with self._mode("eval"), torch.no_grad():
            yield

    def train_batch(self, data: TensorDict, loss_function: LossFunction, **options: Any) -> EngineOutput:
        """Run one optimizer step on the rows of one mini-batch.

        Args:
            data: this rank's rows; with a plan, in its dispatch order (``plan.rank_rows(rank)``).
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
        """Compute outputs without gradients, and the loss if there is a loss function.

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
