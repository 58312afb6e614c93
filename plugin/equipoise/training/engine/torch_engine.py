"""What the backends that run a HF model in PyTorch share; a backend adds how weights and gradients are spread."""

# torch's distributed modules are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Generator, Mapping
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
from equipoise.training.engine import checkpoint, models
from equipoise.training.engine.base import BaseEngine, EngineOutput, LossFunction, PassOptions, WrongState
from equipoise.training.engine.config import OptimizerConfig
from equipoise.training.engine.device import collective_device, device_name, ensure_process_group, local_device
from equipoise.training.engine.log_probs import IGNORE
from equipoise.training.engine.microbatches import MicroBatches, prepare_micro_batches
from equipoise.training.engine.packing import PackedRow
from equipoise.training.engine.ulysses import gather_sequence, pad_to_multiple, shard_sequence, sharded
from equipoise.training.loss import LossDenominators
from equipoise.training.loss.metrics import AnyMetric, MaxMetric, Metric, MinMetric, merge_metrics

_EMPTY: dict[type[AnyMetric], AnyMetric] = {
    Metric: Metric(0.0, 0),
    MaxMetric: MaxMetric(-math.inf),
    MinMetric: MinMetric(math.inf),
}


class _FromInitialize:
    """An attribute that ``initialize`` sets; until then it says so."""

    def __get__(self, engine: object | None, owner: type) -> Any:
        if engine is None:
            return self
        remedy = "call initialize() first, on every rank"
        raise WrongState(must("engine", "be initialized before it is used", "one that is not", remedy))


class TorchEngine(BaseEngine):
    """A HF model on every rank of the world, ``sp_size`` neighbours sharing rows: those are given the same data.

    Args:
        config: see :class:`equipoise.training.engine.EngineConfig`.
        model: folder or hub name, HF configuration, or HF module.
    """

    module: Any = _FromInitialize()
    dp_group: Any = _FromInitialize()
    sp_group: Any = _FromInitialize()
    optimizer: torch.optim.Optimizer | None = None
    _device: Any = _FromInitialize()
    _rate_step: int = 0
    _last_data: TensorDict | None = None

    def initialize(self) -> None:
        """Start torch.distributed if nobody has, build the model and spread it, make the optimizer."""
        name = self.config.device or device_name()
        device = local_device(name)
        ensure_process_group(name)
        world, sp = dist.get_world_size(), self.config.sp_size
        if world % sp:
            raise InvalidInput(must("sp_size", f"divide the {world} ranks", sp, "use a divisor"))
        self._device, self.dp_group, self.sp_group = device, dist.group.WORLD, None
        if sp > 1:
            mesh = init_device_mesh(device.type, (world // sp, sp), mesh_dim_names=("dp", "sp"))
            self.dp_group, self.sp_group = mesh.get_group("dp"), mesh.get_group("sp")
        self.module = self._spread()
        self._rate_step = 0
        self._last_data = None
        if self.config.optimizer is not None:
            self.optimizer = _optimizer(self.config.optimizer, [p for p in self.module.parameters() if p.requires_grad])
        self.to("cpu", model=self.config.offload_params, optimizer=self.config.offload_optimizer)

    @abstractmethod
    def _spread(self) -> Any:
        """Build the module on the compute device, with the same weights on all ranks."""

    @abstractmethod
    def _before_micro_batch(self, *, last: bool) -> None:
        """Say whether gradients meet in the coming backward."""

    @abstractmethod
    def _after_pass(self, *, forward_only: bool) -> None:
        """Average gradients over ranks, unless backward has, and free what the pass gathered."""

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, enabled=False)

    @property
    def compute_device(self) -> torch.device:
        """Where forward and backward run."""
        return self._device

    def set_training(self, training: bool) -> None:
        """Switch dropout and the like on or off."""
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
        asked = PassOptions(**options)
        if loss_function is None and not forward_only:
            raise InvalidInput(
                must("loss_function", "be given for training", None, "pass forward_only=True for outputs")
            )
        micro_batches = self._micro_batches(data, asked)
        self._last_data = data
        outputs: list[dict[str, torch.Tensor]] = []
        metrics: list[Mapping[str, AnyMetric]] = []
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for i, (micro_batch, rows) in enumerate(zip(micro_batches.batches, micro_batches.indices, strict=True)):
            self._before_micro_batch(last=i == len(micro_batches.batches) - 1)
            micro_batch = cast(TensorDict, micro_batch.to(self._device))
            columns = self._forward(micro_batch, asked)
            # Attached to every output, so that backward runs through all weights whatever the loss reads.
            loss = _nothing(columns)
            if loss_function is not None and rows.size:
                given: Any = loss_function(columns, micro_batch, self.dp_group)
                share, logged = _checked_loss(given, training=not forward_only)
                loss = share + loss
                metrics.append(logged)
            if not forward_only:
                loss.backward()
            total += loss.detach()
            outputs.append({name: column.detach() for name, column in columns.items()})
        self._after_pass(forward_only=forward_only)
        model_output = micro_batches.restore(outputs)
        if loss_function is None:
            return EngineOutput(loss=None, metrics={}, model_output=model_output)
        loss, merged = self._met(total, merge_metrics(metrics))
        return EngineOutput(loss=loss, metrics=merged, model_output=model_output)

    def optimizer_zero_grad(self) -> None:
        """Forget gradients."""
        self._needed_optimizer().zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        """Clip and step; skip where the norm is not finite, or where no token of the step counts on any rank."""
        optimizer = self._needed_optimizer()
        limit = cast(OptimizerConfig, self.config.optimizer).max_grad_norm
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        value = float(norm)
        if not math.isfinite(value):
            self._skip(f"the gradient norm is {value}")
        elif value == 0 and self._no_token_counts():
            self._skip("no token counts on any rank")
        else:
            if limit is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._last_data = None
        return value

    def lr_scheduler_step(self) -> float:
        """Go on to the next learning rate and return it."""
        self._needed_optimizer()
        self._rate_step += 1
        return self._set_rate()

    def get_data_parallel_size(self) -> int:
        """Number of ranks that hold different rows."""
        return dist.get_world_size(self.dp_group)

    def get_data_parallel_rank(self) -> int:
        """Number of this rank among them."""
        return dist.get_rank(self.dp_group)

    def get_data_parallel_group(self) -> Any:
        """Process group of the ranks that hold different rows."""
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
        counters = {
            "rate_step": self._rate_step,
            "num_skipped_steps": self.num_skipped_steps,
            "has_optimizer_state": self._has_optimizer_state(),
        }
        return checkpoint.save(
            local_path,
            self._state(with_optimizer=self._has_optimizer_state()),
            step=global_step,
            extra={"engine": counters, "caller": dict(extra or {})},
            keep=max_ckpt_to_keep,
        )

    def load_checkpoint(self, local_path: str | Path, *, global_step: int | None = None) -> dict[str, Any]:
        """Load the latest complete checkpoint, or that of a step, and return its ``extra``."""
        path = checkpoint.find(local_path, global_step)
        extra = checkpoint.read_extra(path)
        counters = extra["engine"]
        with_optimizer = self.optimizer is not None and counters["has_optimizer_state"]
        state = self._state(with_optimizer=with_optimizer)
        checkpoint.load(path, state)
        set_model_state_dict(self.module, state["model"])
        if self.optimizer is not None:
            if with_optimizer:
                set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])
            else:
                self.optimizer.state.clear()
            self._rate_step = counters["rate_step"]
            self._set_rate()
        self.num_skipped_steps = counters["num_skipped_steps"]
        if self.mode is None:
            self.to("cpu", model=self.config.offload_params, optimizer=self.config.offload_optimizer)
        return extra["caller"]

    def _state(self, *, with_optimizer: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(self.module)}
        if with_optimizer and self.optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self.module, self.optimizer)
        return state

    def _has_optimizer_state(self) -> bool:
        """False before the first step: asking torch for the state of then would make one, with a step counted."""
        return self.optimizer is not None and bool(self.optimizer.state)

    def _micro_batches(self, data: TensorDict, asked: PassOptions) -> MicroBatches:
        if asked.plan is not None:
            limit = self.config.max_token_len_per_gpu
            alone = self.config.oversize == asked.plan.spec.oversize == "alone"
            most = asked.plan.spec.cap if alone else asked.plan.stats.max_tokens
            if limit is not None and (most is None or most > limit * self.config.sp_size):
                rule = f"keep to the engine's cap of {limit * self.config.sp_size} tokens"
                raise InvalidInput(must("plan", rule, most, "plan with the engine's max_token_len_per_gpu and sp_size"))
            return prepare_micro_batches(data, plan=asked.plan, mini_batch=asked.mini_batch, group=self.dp_group)
        cap, rows = self.config.max_token_len_per_gpu, self.config.micro_batch_size_per_gpu
        if asked.max_token_len_per_gpu is not None or asked.micro_batch_size_per_gpu is not None:
            cap, rows = asked.max_token_len_per_gpu, asked.micro_batch_size_per_gpu
        if cap is None and rows is None:
            remedy = "set it, or micro_batch_size_per_gpu, in EngineConfig or for the pass"
            raise InvalidInput(must("max_token_len_per_gpu", "be given without a plan", None, remedy))
        return prepare_micro_batches(
            data,
            max_token_len=cap,
            micro_batch_size=rows,
            sp_size=self.config.sp_size,
            force_group_size=self.config.force_group_size,
            on_shortage=self.config.on_shortage,
            oversize=self.config.oversize,
            group=self.dp_group,
        )

    def _forward(self, micro_batch: TensorDict, asked: PassOptions) -> dict[str, torch.Tensor]:
        row = PackedRow.of(micro_batch)
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

    def _met(self, total: torch.Tensor, metrics: dict[str, AnyMetric]) -> tuple[float, dict[str, AnyMetric]]:
        """Mean loss over ranks, and metrics under the same names on all: a rank without rows knows none of its own."""
        nameless = torch.tensor(not metrics, dtype=torch.float64, device=total.device)
        both = torch.stack([total, nameless]).to(collective_device(self.dp_group))
        dist.all_reduce(both, group=self.dp_group)
        loss, num_nameless = both.tolist()
        if 0 < num_nameless < self.get_data_parallel_size():
            kinds = {name: type(metric) for name, metric in metrics.items()}
            everyones: list[dict[str, type[AnyMetric]]] = [{}] * self.get_data_parallel_size()
            dist.all_gather_object(everyones, kinds, group=self.dp_group)
            if not metrics:
                metrics = {name: _EMPTY[kind] for known in everyones for name, kind in known.items()}
        return loss / self.get_data_parallel_size(), metrics

    def _no_token_counts(self) -> bool:
        """Asked on all ranks or on none: the gradient norm is the same on all. False where no mask tells."""
        data = self._last_data
        mask = None if data is None else data.get("loss_mask", None)
        if data is None or not isinstance(mask, torch.Tensor):
            local = int(data is None or len(data) > 0)
        else:
            local = LossDenominators.of(mask, is_padding=data.get("is_padding", None)).num_tokens
        count = torch.tensor(local, device=collective_device(self.dp_group))
        dist.all_reduce(count, group=self.dp_group)
        return int(count) == 0

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


def same_everywhere(module: models.AnyModel, device: torch.device) -> models.AnyModel:
    """Give all ranks the weights and buffers of rank 0, tensor by tensor by way of ``device``."""
    if dist.get_world_size() > 1:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                there = tensor.to(device)
                dist.broadcast(there, src=0)
                tensor.copy_(there)
    return module


def _optimizer(config: OptimizerConfig, parameters: list[Any]) -> torch.optim.Optimizer:
    rate = config.lr_at(0)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, lr=rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


def _checked_loss(given: Any, *, training: bool) -> tuple[torch.Tensor, Mapping[str, AnyMetric]]:
    """What a loss function gives: a share that trains something, and metrics that merge with other micro-batches'."""
    parts: tuple[Any, ...] = cast("tuple[Any, ...]", given) if isinstance(given, tuple) else (given,)
    if len(parts) != 2 or not isinstance(parts[0], torch.Tensor) or not isinstance(parts[1], Mapping):
        got = [type(part).__name__ for part in parts]
        rule = "return (loss, metrics): a tensor and a mapping of names to eq.Metric"
        raise InvalidInput(must("loss_function", rule, got, "return (loss, {}) where there is nothing to log"))
    share, metrics = cast("tuple[torch.Tensor, Mapping[str, AnyMetric]]", parts)
    if training and not share.requires_grad:
        remedy = "compute it from the outputs it is given, without detach"
        raise InvalidInput(must("loss", "be attached to the model's outputs", "a detached tensor", remedy))
    for name, metric in metrics.items():
        if not isinstance(metric, tuple(_EMPTY)):
            remedy = "use eq.Metric(sum, count), Metric.max or Metric.min"
            raise InvalidInput(must(f"metrics[{name!r}]", "be a metric that merges", metric, remedy))
    return share, metrics


def _nothing(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """0, attached to the graph: gradients of it are exactly 0, even where a column is NaN or infinite."""
    parts: list[torch.Tensor] = []
    for column in columns.values():
        flat: torch.Tensor = cast(Any, column).values()
        parts.append(torch.where(torch.zeros_like(flat, dtype=torch.bool), flat, torch.zeros_like(flat)).sum())
    return torch.stack([part.double() for part in parts]).sum()
