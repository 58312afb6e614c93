"""What backends that run an HF model in PyTorch share; a backend adds how to shard weights and gradients."""

# torch's distributed modules are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from equipoise.errors import EquipoiseWarning, InvalidInput, must
from equipoise.together import together
from equipoise.training.engine import checkpoint
from equipoise.training.engine.agreement import Ask
from equipoise.training.engine.base import BaseEngine, EngineOutput, LossFunction, PassOptions, WrongState
from equipoise.training.engine.config import OptimizerConfig
from equipoise.training.engine.device import device_name, ensure_process_group, local_device
from equipoise.training.engine.log_probs import IGNORE
from equipoise.training.engine.microbatches import MicroBatches, agreed_micro_batches, prepare_micro_batches, weightless
from equipoise.training.engine.packing import PackedRow
from equipoise.training.engine.pass_options import check_cap, pass_options, requested
from equipoise.training.engine.passes import Pass
from equipoise.training.engine.start import FromInitialize, optimizer_of
from equipoise.training.engine.ulysses import gather_sequence, pad_to_multiple, shard_sequence, sharded


class TorchEngine(BaseEngine):
    """An HF model on every rank; ``sp_size`` neighboring ranks share rows and get the same data.

    Args:
        config: see :class:`equipoise.training.engine.EngineConfig`.
        model: folder or hub name, HF configuration, or HF module.
    """

    module: Any = FromInitialize()
    dp_group: Any = FromInitialize()
    sp_group: Any = FromInitialize()
    optimizer: torch.optim.Optimizer | None = None
    _device: Any = FromInitialize()
    _rate_step: int = 0
    _num_counted: int | None = None
    """Tokens behind the gradients, over all ranks; None if nobody has counted them."""

    def initialize(self) -> None:
        """Start torch.distributed if necessary, build and shard the model, build the optimizer."""
        name, sp = self.config.device or device_name(), self.config.sp_size
        if not dist.is_initialized():
            local_device(name)
            ensure_process_group(name)

        def place() -> torch.device:
            if dist.get_world_size() % sp:
                raise InvalidInput(must("sp_size", f"divide the {dist.get_world_size()} ranks", sp, "use a divisor"))
            return local_device(name)

        self._device = together(place, group=dist.group.WORLD, doing="looking for the device")
        self.dp_group, self.sp_group = dist.group.WORLD, None
        if sp > 1:
            sizes = (dist.get_world_size() // sp, sp)
            mesh = init_device_mesh(self._device.type, sizes, mesh_dim_names=("dp", "sp"))
            self.dp_group, self.sp_group = mesh.get_group("dp"), mesh.get_group("sp")
        self.module = self._spread()
        self._rate_step = 0
        self._num_counted = None
        together(self._prepare, group=dist.group.WORLD, doing="making the optimizer")

    def _prepare(self) -> None:
        if self.config.optimizer is not None:
            self.optimizer = optimizer_of(
                self.config.optimizer, [p for p in self.module.parameters() if p.requires_grad]
            )
        self.to("cpu", model=self.config.offload_params, optimizer=self.config.offload_optimizer)

    @abstractmethod
    def _spread(self) -> Any:
        """Build the module on the compute device, with the same weights on all ranks."""

    @property
    @abstractmethod
    def _meets_in_forward(self) -> bool:
        """Whether forward and backward synchronize ranks, so that no rank may skip them."""

    @abstractmethod
    def _before_micro_batch(self, *, last: bool) -> None:
        """Set whether the next backward reduces gradients."""

    @abstractmethod
    def _free_gathered(self, *, forward_only: bool) -> None:
        """Free the weights that the pass gathered."""

    @abstractmethod
    def _average_gradients(self) -> None:
        """Average gradients over ranks, unless backward did."""

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, enabled=False)

    @property
    def compute_device(self) -> torch.device:
        """The device of forward and backward."""
        return self._device

    def set_training(self, training: bool) -> None:
        """Switch between training and evaluation behavior, such as dropout."""
        self.module.train(training)

    def to(self, device: str | torch.device, *, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and gradients, optimizer states, or both."""
        if model:
            self.module.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and name != "step":  # AdamW counts on the CPU
                        state[name] = value.to(device)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False, **options: Any
    ) -> EngineOutput:
        """Run all micro-batches of ``data``; see :meth:`BaseEngine.forward_backward_batch`."""
        run = Pass(loss_function, training=not forward_only, dp_group=self.dp_group)
        with ExitStack() as undo:
            undo.callback(self._forget_gradients, training=not forward_only)
            asked = run.held.run(lambda: pass_options(loss_function, forward_only, options), instead=None)
            micro_batches = self._micro_batches(run, data, asked, options.get("plan"), options.get("mini_batch"))
            for i, (micro_batch, rows) in enumerate(zip(*micro_batches, strict=True)):
                self._before_micro_batch(last=i == len(micro_batches.batches) - 1)
                one = partial(self._run, run, micro_batch, rows, asked or PassOptions(), forward_only=forward_only)
                if self._meets_in_forward:
                    one()
                else:
                    run.held.run(one, instead=None)
            self._free_gathered(forward_only=forward_only)
            output, num_counted = run.meet(micro_batches)
            undo.pop_all()
        if not forward_only:
            self._num_counted = (self._num_counted or 0) + num_counted
            self._average_gradients()
        return output

    def _run(self, run: Pass, micro_batch: TensorDict, rows: Any, asked: PassOptions, *, forward_only: bool) -> None:
        """Forward, loss and backward of one micro-batch; of a zero-weight one after an error on this rank."""
        moved = run.held.run(lambda: cast(TensorDict, micro_batch.to(self._device)), instead=micro_batch)
        packed = run.held.run(lambda: PackedRow.of(moved), instead=None)
        if packed is None:
            if self.sp_group is not None:  # the ranks that share the row cannot continue without it
                run.held.release()
            packed = PackedRow.of(cast(TensorDict, weightless(1).batches[0].to(self._device)))
        loss = run.loss(self._forward(packed, asked), moved, rows)
        if not forward_only:
            loss.backward()

    def _forget_gradients(self, *, training: bool) -> None:
        """Clean up after a failed pass: nothing of it may reach an optimizer step."""
        if training:
            for parameter in self.module.parameters():
                parameter.grad = None
            self._num_counted = None

    def optimizer_zero_grad(self) -> None:
        """Forget gradients."""
        self._needed_optimizer().zero_grad(set_to_none=True)
        self._num_counted = None

    def optimizer_step(self) -> float:
        """Clip and step; skip the step if the norm is not finite, or if no token counts on any rank."""
        optimizer = self._needed_optimizer()
        limit = cast(OptimizerConfig, self.config.optimizer).max_grad_norm
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        value = float(norm)
        if not math.isfinite(value):
            self._skip(f"the gradient norm is {value}")
        elif value == 0 and self._num_counted == 0:
            self._skip("no token counts on any rank")
        else:
            if limit is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
            optimizer.step()
        self.optimizer_zero_grad()
        return value

    def lr_scheduler_step(self) -> float:
        """Advance the learning-rate schedule and return the new rate."""
        self._needed_optimizer()
        self._rate_step += 1
        return self._set_rate()

    def get_data_parallel_size(self) -> int:
        """Number of ranks with different rows."""
        return dist.get_world_size(self.dp_group)

    def get_data_parallel_rank(self) -> int:
        """Index of this rank among them."""
        return dist.get_rank(self.dp_group)

    def get_data_parallel_group(self) -> Any:
        """Process group of the ranks with different rows."""
        return self.dp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """True on the first of the ranks that share rows."""
        return self.sp_group is None or dist.get_rank(self.sp_group) == 0

    def get_per_tensor_param(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Full tensors one by one, by HF names, on the compute device."""
        for name, value in self.module.state_dict().items():
            value = value.detach().to(self._device)
            yield self.module.hf_name(name), value.full_tensor() if hasattr(value, "full_tensor") else value

    def save_checkpoint(
        self,
        local_path: str | Path,
        *,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save model, optimizer, schedule and ``extra``; see :func:`equipoise.training.engine.checkpoint.save`."""
        _ = self.module  # an engine that is not initialized says so before a folder is made
        counters = {
            "rate_step": self._rate_step,
            "num_skipped_steps": self.num_skipped_steps,
            "has_optimizer_state": self._has_optimizer_state(),
        }
        return checkpoint.save(
            local_path,
            lambda: self._state(with_optimizer=self._has_optimizer_state()),
            step=global_step,
            counters=counters,
            extra=extra,
            keep=max_ckpt_to_keep,
        )

    def load_checkpoint(self, local_path: str | Path, *, global_step: int | None = None) -> dict[str, Any]:
        """Load the latest complete checkpoint, or the one of a step, and return its ``extra``."""
        return checkpoint.load(
            local_path,
            global_step,
            state=lambda counters: self._state(with_optimizer=counters["has_optimizer_state"]),
            use=self._use_state,
        )

    def _state(self, *, with_optimizer: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(self.module)}
        if with_optimizer and self.optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self.module, self.optimizer)
        return state

    def _use_state(self, state: dict[str, Any], counters: dict[str, Any]) -> None:
        set_model_state_dict(self.module, state["model"])
        if self.optimizer is not None:
            if "optimizer" in state:
                set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])
            else:
                self.optimizer.state.clear()
            self._rate_step = counters["rate_step"]
            self._set_rate()
        self.num_skipped_steps = counters["num_skipped_steps"]
        if self.mode is None:
            self.to("cpu", model=self.config.offload_params, optimizer=self.config.offload_optimizer)

    def _has_optimizer_state(self) -> bool:
        """False before the first step, when asking torch for the state would create one that counts a step."""
        return self.optimizer is not None and bool(self.optimizer.state)

    def _micro_batches(
        self, run: Pass, data: TensorDict, asked: PassOptions | None, plan: Any, mini_batch: Any
    ) -> MicroBatches:
        if plan is None:

            def ask() -> Ask:
                run.held.release()
                return requested(self.config, cast(PassOptions, asked))

            # Includes ranks that share rows: an error on one of them must reach all.
            return agreed_micro_batches(data, ask, group=dist.group.WORLD)
        found = run.held.run(lambda: self._planned(data, cast(PassOptions, asked)), instead=None)
        if found is not None:
            return found
        counts = plan.num_micro_batches if mini_batch is None else plan.num_micro_batches[mini_batch : mini_batch + 1]
        if self._meets_in_forward and (self.sp_group is not None or not counts):
            run.held.release()  # the others cannot continue without this rank
        return weightless(sum(counts))

    def _planned(self, data: TensorDict, asked: PassOptions) -> MicroBatches:
        plan = asked.plan
        assert plan is not None
        check_cap(self.config, plan)
        return prepare_micro_batches(data, plan=plan, mini_batch=asked.mini_batch, group=self.dp_group)

    def _forward(self, row: PackedRow, asked: PassOptions) -> dict[str, torch.Tensor]:
        padded = ((row.input_ids, 0), (row.position_ids, 0), (row.labels, IGNORE))
        inputs = [
            shard_sequence(pad_to_multiple(whole, self.config.sp_size, value=value), self.sp_group)
            for whole, value in padded
        ]
        with sharded(row.offsets, self.sp_group), self._autocast():
            columns = self.module(*inputs, temperature=asked.temperature, with_entropy=asked.with_entropy)
        tokens = row.input_ids.shape[-1]
        gathered = {name: gather_sequence(column, self.sp_group, length=tokens) for name, column in columns.items()}
        return {name: row.unpack(column) for name, column in gathered.items()}

    def _skip(self, why: str) -> None:
        self.num_skipped_steps += 1
        warnings.warn(f"optimizer step skipped: {why}", EquipoiseWarning, stacklevel=3)

    def _needed_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            remedy = "set EngineConfig.optimizer and call initialize"
            raise WrongState(must("optimizer", "be there for training", None, remedy))
        return self.optimizer

    def _set_rate(self) -> float:
        rate = cast(OptimizerConfig, self.config.optimizer).lr_at(self._rate_step)
        for group in self._needed_optimizer().param_groups:
            group["lr"] = rate
        return rate
