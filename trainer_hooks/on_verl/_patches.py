"""Every place where verl is patched or relied on, the version it was read in, and how to undo it.

verl 0.9.1. These names are replaced; all others are only called or relied on:

* ``PPOTrainer.__init__`` (verl/trainer/ppo/v1/trainer_base.py:120) attaches to instances whose configuration has the
  node; verl offers no hook between the trainer's construction and its first step, and trainer names other than "sync"
  change its replay buffer. Methods are replaced on that instance only. Until verl calls a balancing hook of its own.
* ``RayPPOTrainer.__init__`` (verl/trainer/ppo/ray_trainer.py) rejects the node on the legacy trainer, which ends with
  verl 0.9. Until that trainer is gone.
* ``prepare_micro_batches`` (verl/workers/engine/utils.py:92) takes micro-batches from a plan that the batch carries.
  Until verl's engines accept prepared micro-batches.
* ``postprocess_batch_func`` (verl/workers/engine/utils.py:158) adds the seconds of the micro-batches to an update's
  metrics if the plan asks for them (cost=fitted). They travel in the gather that verl makes of its metrics anyway
  (``TrainingWorker._postprocess_output``), and ``caught_times`` removes them on the driver before verl averages.
  Until verl reports its own times.
* ``agg_loss`` (verl/trainer/ppo/core_algos.py:1140), ``ppo_loss`` and ``value_loss`` (verl/workers/utils/losses.py)
  and the ``no_padding_2_padding`` that these two call; see ``worker/loss.py``. They behave as verl's unless the batch
  asks for an exact loss (loss=exact). Until verl applies the mask before it computes.

``undo`` restores all of them.

With ``equipoise.rollout.enable=true`` (``router/setup.py``) ``rollout.router_config_path`` names the plugin's router,
and ``get_llm_client`` of the trainer instance (verl/trainer/ppo/v1/trainer_base.py:396) returns a subclass of the
client that verl would have returned (verl/workers/rollout/llm_server.py): verl's client does not report response
lengths to a router, and the synchronous one does not continue an aborted request. Until it does both.
"""

# verl is not typed; its objects are Any here and everything that comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from equipoise.errors import PatchMismatch

VERL_VERSIONS = ("0.9.1",)


@dataclass(frozen=True)
class PatchPoint:
    """A verl function that the hook replaces, wraps or relies on, by the digest of its source."""

    module: str
    name: str
    digest: str

    def found(self) -> str:
        """Digest of the installed function; "missing" if there is none."""
        owner: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            owner = getattr(owner, part, None)
        if owner is None:
            return "missing"
        return digest(inspect.unwrap(owner))


def digest(function: Callable[..., Any]) -> str:
    """Digest of a function's source without whitespace."""
    source = re.sub(r"\s+", "", inspect.getsource(function))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_PADDING = "verl.trainer.ppo.padding_utils"
_CORE = "verl.trainer.ppo.core_algos"
_LOSSES = "verl.workers.utils.losses"
POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(_TRAINER, "PPOTrainer.__init__", "4e4c19f9f387560c"),
    PatchPoint(_TRAINER, "PPOTrainer.init", "af1dd2f86d9472c7"),
    PatchPoint(_TRAINER, "PPOTrainer._step_once", "dd50fd8826a9f4be"),
    PatchPoint(_TRAINER, "PPOTrainer._get_required_batch_multiple", "cf4f84ad5f3f6029"),
    PatchPoint(_TRAINER, "PPOTrainer._balance_batch", "87892a09d4940207"),
    PatchPoint(_TRAINER, "PPOTrainer._compute_old_log_prob", "6f81636550011629"),
    PatchPoint(_TRAINER, "PPOTrainer._compute_ref_log_prob", "ed7792d959cc64a1"),
    PatchPoint(_TRAINER, "PPOTrainer._compute_values", "6585477afe6b4d37"),
    PatchPoint(_TRAINER, "PPOTrainer._update_critic", "f5b8438f3e454f2d"),
    PatchPoint(_TRAINER, "PPOTrainer._update_actor", "53260955f7bc2f68"),
    PatchPoint(_PADDING, "upsample_batch_to_divisible_size", "44551c82c7f0e6fb"),
    PatchPoint(_PADDING, "construct_minimal_padding_template", "9edb1b31cd9c086c"),
    PatchPoint("verl.workers.engine.utils", "prepare_micro_batches", "a74559dd0ed33e09"),
    PatchPoint("verl.workers.engine.utils", "postprocess_batch_func", "1f4ed244afd6e42b"),
    PatchPoint(_CORE, "agg_loss", "f64efb504103d267"),
    PatchPoint(_LOSSES, "ppo_loss", "3b76cb0b848481c9"),
    PatchPoint(_LOSSES, "value_loss", "233c6e0391e3c6fc"),
    PatchPoint("verl.workers.utils.padding", "no_padding_2_padding", "7aaddf094319e512"),
    PatchPoint("verl.utils.seqlen_balancing", "rearrange_micro_batches", "6be2e290c47e56f9"),
    PatchPoint("verl.workers.engine_workers", "TrainingWorker.train_mini_batch", "3cc1cbfc5c1ab838"),
    PatchPoint("verl.workers.engine_workers", "TrainingWorker._postprocess_output", "e3714152bf408270"),
)

_SERVERS = "verl.workers.rollout.llm_server"
_ROUTER = "verl.workers.rollout.router"
ROLLOUT_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(_TRAINER, "PPOTrainer.get_llm_client", "5b57346bf245a36f"),
    PatchPoint(_SERVERS, "LLMServerClient.__init__", "94b29e341c1d3965"),
    PatchPoint(_SERVERS, "LLMServerClient.generate", "77d32d130980684b"),
    PatchPoint(_SERVERS, "LLMServerClient._acquire_server", "7d30ed04debb93a8"),
    PatchPoint(_SERVERS, "LLMServerClient._release_server", "92583fadc65550ff"),
    PatchPoint(_SERVERS, "LLMServerClient._vllm_request_id", "d2bb77982e2c9b1d"),
    PatchPoint(_SERVERS, "FullyAsyncLLMServerClient.__init__", "cab5a5c7a841583e"),
    PatchPoint(_SERVERS, "FullyAsyncLLMServerClient.generate", "108094b2822c87a2"),
    PatchPoint(_SERVERS, "FullyAsyncLLMServerClient._acquire_server", "90dfd3c341e16a72"),
    PatchPoint(_SERVERS, "LLMServerManager._init_global_load_balancer", "7952eed6d7f6c453"),
    PatchPoint(_SERVERS, "LLMServerManager.get_client", "2c161e3757068a64"),
    PatchPoint(_ROUTER, "get_router_handle", "05e2b3314e7398a4"),
    PatchPoint(_ROUTER, "_create_plugin_extension", "00a2f888c92a8d11"),
)

WIRE_KEY = "equipoise_plan"  # of the plan in a batch's extra information
CLOCK_KEY = "equipoise_clock"  # of the timed micro-batches in a mini-batch
TIMES_KEY = "equipoise_seconds"  # of their seconds in the metrics of an update
EXACT_KEY = "equipoise_exact_loss"  # in a batch's extra information: its loss is to be exact
_undo: list[Callable[[], None]] = []


def changed_points(*, rollout: bool = True) -> list[str]:
    """Differences from the tested verl, one line each; including those for ``equipoise.rollout``."""
    lines: list[str] = []
    for point in (*POINTS, *(ROLLOUT_POINTS if rollout else ())):
        try:
            found = point.found()
        except ImportError as error:
            found = f"not importable ({error})"
        if found != point.digest:
            lines.append(f"{point.module}.{point.name}: expected {point.digest}, found {found}")
    return lines


def check_points(*, rollout: bool = False) -> None:
    """Reject a verl that the hook was not written for.

    Args:
        rollout: also check what ``equipoise.rollout`` relies on.

    Raises:
        PatchMismatch: a function that the hook replaces or relies on has different source.
    """
    lines = changed_points(rollout=rollout)
    if lines:
        verl: Any = importlib.import_module("verl")
        raise PatchMismatch(
            f"verl must be {' or '.join(VERL_VERSIONS)} where Equipoise attaches, got {verl.__version__} with different"
            " code in:\n  "
            + "\n  ".join(lines)
            + "\ninstall verl==0.9.1, remove +equipoise from the command line, or set"
            " equipoise.check_patch_points=false at your own risk"
        )


def patch_trainer(module: ModuleType) -> None:
    """Make ``PPOTrainer`` look for the node when it is constructed."""
    trainer: Any = module.__dict__["PPOTrainer"]
    original = trainer.__init__

    @functools.wraps(original)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        node = config.get("equipoise", None)
        if node is None:
            original(self, config, *args, **kwargs)
            return
        from equipoise.trainer_hooks.on_verl.driver.attach import attach, read_config
        from equipoise.trainer_hooks.on_verl.router.setup import choose_router

        settings = read_config(config)
        choose_router(config, settings)
        original(self, config, *args, **kwargs)
        attach(self, settings)

    trainer.__init__ = construct
    _undo.append(lambda: setattr(trainer, "__init__", original))


def patch_legacy_trainer(module: ModuleType) -> None:
    """Make the legacy ``RayPPOTrainer`` reject the node instead of ignoring it."""
    trainer: Any = module.__dict__["RayPPOTrainer"]
    original = trainer.__init__

    @functools.wraps(original)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.get("equipoise", None) is not None:
            from equipoise.trainer_hooks.on_verl.driver.attach import refuse_legacy

            refuse_legacy(config)
        original(self, config, *args, **kwargs)

    trainer.__init__ = construct
    _undo.append(lambda: setattr(trainer, "__init__", original))


def patch_engines(module: ModuleType) -> None:
    """Make every engine's ``prepare_micro_batches`` follow the batch's plan, if any, and time it if asked."""
    original = module.__dict__["prepare_micro_batches"]
    original_end = module.__dict__["postprocess_batch_func"]

    @functools.wraps(original)
    def prepare_micro_batches(data: Any, *args: Any, **kwargs: Any) -> Any:
        if data.get(WIRE_KEY, None) is None:
            return original(data, *args, **kwargs)
        from equipoise.trainer_hooks.on_verl.worker.micro_batches import prepare_planned

        return prepare_planned(original, data, *args, **kwargs)

    @functools.wraps(original_end)
    def postprocess_batch_func(output_lst: Any, indices: Any, data: Any) -> Any:
        output = original_end(output_lst, indices, data)
        if data.get(CLOCK_KEY, None) is not None:
            from equipoise.trainer_hooks.on_verl.worker.clock import add_times

            add_times(output, data)
        return output

    _replace(original, prepare_micro_batches)
    _replace(original_end, postprocess_batch_func)


def patch_aggregation(module: ModuleType) -> None:
    """Let ``agg_loss`` be :func:`equipoise.agg_loss` inside an exact loss, wherever verl has bound the name."""
    original = module.__dict__["agg_loss"]

    @functools.wraps(original)
    def agg_loss(*args: Any, **kwargs: Any) -> Any:
        from equipoise.trainer_hooks.on_verl.worker.loss import aggregate

        return aggregate(original, *args, **kwargs)

    _replace(original, agg_loss)


def patch_losses(module: ModuleType) -> None:
    """Make the losses of actor and critic exact if the batch asks for it."""
    for name in ("ppo_loss", "value_loss"):
        _replace(module.__dict__[name], _exact_if_asked(module.__dict__[name]))
    original = module.__dict__["no_padding_2_padding"]

    @functools.wraps(original)
    def no_padding_2_padding(tensor: Any, data: Any) -> Any:
        from equipoise.trainer_hooks.on_verl.worker.loss import select

        return select(original, tensor, data)

    module.__dict__["no_padding_2_padding"] = no_padding_2_padding  # only here: other modules do not compute losses
    _undo.append(lambda: setattr(module, "no_padding_2_padding", original))


def _exact_if_asked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        if data.get(EXACT_KEY, None) is None:
            return original(config, model_output, data, dp_group)
        from equipoise.trainer_hooks.on_verl.worker.loss import exact_loss

        return exact_loss(original, config, model_output, data, dp_group)

    return loss


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Replace function ``old`` with ``new`` in every loaded module that has bound it under its name.

    Modules loaded later bind the new one; ``undo`` finds all of them.
    """

    def swap(was: Callable[..., Any], now: Callable[..., Any]) -> None:
        for loaded in list(sys.modules.values()):
            names = getattr(loaded, "__dict__", {})
            if names.get(old.__name__) is was:
                names[old.__name__] = now

    swap(old, new)
    _undo.append(lambda: swap(new, old))


@contextmanager
def caught_times(group: Any) -> Generator[list[float], None, None]:
    """Within the block, move the workers' times from the result of ``group.update_actor`` to the list.

    verl would average them with its metrics.
    """
    original, own = group.update_actor, "update_actor" in vars(group)
    times: list[float] = []

    @functools.wraps(original)
    def update_actor(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        times.extend(output["metrics"].pop(TIMES_KEY, []))
        return output

    group.update_actor = update_actor
    try:
        yield times
    finally:
        if own:
            group.update_actor = original
        else:
            del group.update_actor


def undo() -> None:
    """Restore verl. Attached trainers keep their plans."""
    while _undo:
        _undo.pop()()
