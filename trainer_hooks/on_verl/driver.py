"""On the driver: pad, plan, reorder, and send each update and pass its plan.

``attach`` replaces methods of one trainer instance. Between verl's stages the batch is only keys and tags, so that each
stage can have an order of its own for nothing.
"""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.config import EquipoiseConfig
from equipoise.errors import InfeasiblePlan, InvalidConfig, InvalidInput, must
from equipoise.planning.step import StepPlan, plan_step, required_batch_multiple
from equipoise.planning.workload import FittedCost
from equipoise.trainer_hooks.on_verl import _patches
from equipoise.trainer_hooks.on_verl.record import Recorder
from equipoise.trainer_hooks.on_verl.refit import OnlineFit, measured_calls
from equipoise.trainer_hooks.on_verl.rollout import attach_rollout
from equipoise.trainer_hooks.on_verl.rows import StepRows, neutral_order
from equipoise.trainer_hooks.on_verl.settings import (
    Stage,
    StageSettings,
    cost_model,
    least_row_tokens,
    stage_settings,
)
from equipoise.trainer_hooks.on_verl.wire import encode, wire_of, wire_of_counts

IntArray = npt.NDArray[np.int64]
logger = logging.getLogger("equipoise")

_METHODS: dict[Stage, str] = {
    "old_log_prob": "_compute_old_log_prob",
    "ref": "_compute_ref_log_prob",
    "values": "_compute_values",
    "critic": "_update_critic",
    "actor": "_update_actor",
}


def read_config(config: Any) -> EquipoiseConfig:
    """The node, checked; and that verl is the one that the hook was written for.

    Raises:
        InvalidConfig: the node is no mapping, has an unknown key or an illegal value.
        PatchMismatch: verl differs.
    """
    from omegaconf import DictConfig, OmegaConf

    node = config.get("equipoise")
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    settings = EquipoiseConfig.from_node(plain)
    if settings.enable:
        _check_early(config)
        if settings.check_patch_points:
            _patches.check_points(rollout=settings.rollout.enable)
    return settings


def refuse_legacy(config: Any) -> None:
    """Stop a legacy trainer whose configuration asks for Equipoise.

    Raises:
        InvalidConfig: the node is there and enabled.
    """
    from omegaconf import DictConfig, OmegaConf

    node = config.get("equipoise")
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    if EquipoiseConfig.from_node(plain).enable:
        raise InvalidConfig(
            must(
                "trainer.use_v1",
                "be true with +equipoise: the legacy trainer is not served",
                config.trainer.get("use_v1", None),
                "set trainer.use_v1=True or remove +equipoise",
            )
        )


def attach(trainer: Any, config: EquipoiseConfig) -> None:
    """Take over balancing on ``trainer``; nothing at all when disabled."""
    if not config.enable:
        return
    _show_own_lines()
    planner = StepPlanner(trainer, config)
    original_init, original_balance = trainer.init, trainer._balance_batch

    def init() -> None:
        original_init()
        planner.check()

    trainer.init = init
    if config.planner == "verl":
        trainer._balance_batch = functools.partial(planner.measure, original_balance)
        attach_rollout(trainer, config)
        logger.info("equipoise: measures verl's own balancing (planner=verl); nothing else is attached")
        return
    trainer._balance_batch = planner.balance
    attach_rollout(trainer, config)
    for stage, name in _METHODS.items():
        setattr(trainer, name, functools.partial(planner.run, stage, getattr(trainer, name)))
    logger.info(
        "equipoise: plans each step of %s (algorithm=%s, cost=%s, composition=%s): padding, order, mini-batches, ranks"
        " and micro-batches of %s",
        type(trainer).__name__,
        config.algorithm,
        config.cost,
        config.composition,
        ", ".join(planner.stages()),
    )


def _show_own_lines() -> None:
    """Verl's processes show warnings of foreign loggers only; the plugin's INFO lines need a handler of their own."""
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _check_early(config: Any) -> None:
    """What can be told from the configuration alone, before any process is started."""
    actor = config.actor_rollout_ref.actor
    if not str(actor.get("strategy", "fsdp")).startswith("fsdp"):
        return
    world = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    settings = stage_settings(config, "actor")
    dp_size = max(1, world // settings.sp_size)
    _check_mini_batch("actor_rollout_ref.actor.ppo_mini_batch_size", config, settings, dp_size)


def _check_mini_batch(key: str, config: Any, settings: StageSettings, dp_size: int) -> None:
    rows = settings.mini_batch_rows
    if rows is None:
        return
    n = int(config.actor_rollout_ref.rollout.n)
    if rows % dp_size:
        step = dp_size // math.gcd(dp_size, n)
        prompts = rows // n
        legal = sorted({max(step, prompts // step * step), -(-prompts // step) * step})
        raise InvalidConfig(
            must(
                f"{key} × rollout.n",
                f"be a multiple of the data-parallel size {dp_size}",
                f"{prompts} × {n} = {rows}",
                f"use {' or '.join(map(str, legal))} for {key}",
            )
        )
    fixed = settings.micro_rows
    if fixed is not None and (rows // dp_size) % fixed:
        share = rows // dp_size
        legal = [b for b in range(1, share + 1) if share % b == 0]
        raise InvalidConfig(
            must(settings.cap_key, f"divide the {share} rows of a rank in a mini-batch", fixed, f"use one of {legal}")
        )


class StepPlanner:
    """Plans the steps of one trainer.

    Args:
        trainer: a verl v1 ``PPOTrainer``, constructed.
        config: the checked node.
    """

    def __init__(self, trainer: Any, config: EquipoiseConfig) -> None:
        self.trainer = trainer
        self.config = config
        self.cost = cost_model(config, trainer.config)
        self.fit: OnlineFit | None = None
        if config.cost == "fitted":
            self.fit = OnlineFit(self.cost, window=config.fit_window, min_r2=config.fit_min_r2, warn=self._warn_once)
        self.recorder = Recorder(config.record)
        self._batch: StepRows | None = None
        self._warned: set[str] = set()

    # -- settings -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check, after verl's set-up and before its first rollout, that these settings can be planned.

        Raises:
            InvalidConfig: a mini-batch that the ranks do not divide, or a fixed micro-batch that does not divide it.
        """
        verl = self.trainer.config
        _check_mini_batch(
            "actor_rollout_ref.actor.ppo_mini_batch_size", verl, stage_settings(verl, "actor"), self.dp_size("actor")
        )
        if self.trainer.use_critic:
            _check_mini_batch(
                "critic.ppo_mini_batch_size", verl, stage_settings(verl, "critic"), self.dp_size("critic")
            )
        longest = int(verl.data.max_prompt_length) + int(verl.data.max_response_length)
        for stage in self.stages():
            settings = self.settings(stage)
            if settings.cap is not None and longest > settings.cap * settings.sp_size:
                self._warn_once(
                    f"rows may reach {longest} tokens (max_prompt_length + max_response_length), above the cap"
                    f" {settings.cap} × {settings.sp_size} of {settings.cap_key}; such a row ends the run"
                    " unless equipoise.oversize=alone"
                )

    def stages(self) -> list[Stage]:
        """Updates and passes that this trainer runs."""
        stages: list[Stage] = ["actor", "old_log_prob"]
        if self.trainer.use_reference_policy:
            stages.append("ref")
        if self.trainer.use_critic:
            stages.extend(("critic", "values"))
        return stages

    def settings(self, stage: Stage) -> StageSettings:
        """How verl runs the stage; a reference that is the actor without its adapter runs as the actor does."""
        shared = stage == "ref" and self._shared_reference()
        return stage_settings(self.trainer.config, "old_log_prob" if shared else stage)

    def _shared_reference(self) -> bool:
        return bool(getattr(self.trainer, "ref_in_actor", False))

    def dp_size(self, stage: Stage) -> int:
        """Data-parallel ranks of the stage's worker group, from verl's dispatch mapping."""
        trainer = self.trainer
        if stage in ("critic", "values"):
            group, mesh = trainer.critic_wg, "train"
        elif stage == "ref" and not self._shared_reference():
            group, mesh = trainer.ref_policy_wg, "ref"
        else:
            group, mesh = trainer.actor_rollout_wg, "actor"
        if mesh not in group._dispatch_info:
            group._dispatch_info[mesh] = group._query_dispatch_info(mesh)
        return max(group._dispatch_info[mesh]) + 1

    def _balances(self) -> bool:
        return bool(self.trainer.config.trainer.get("balance_batch", True))

    def _updates_actor(self) -> bool:
        return int(self.trainer.config.trainer.critic_warmup) <= int(self.trainer.global_steps)

    # -- the step -----------------------------------------------------------------------------------------------------

    def balance(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        """Stand in for verl's ``_balance_batch``: pad, plan the next update, reorder."""
        del keep_minibatch  # verl's v1 trainer ignores it; each mini-batch is planned by itself here
        started = time.perf_counter()
        batch = self._pad(batch)
        stage: Stage = "actor" if self._updates_actor() or not self.trainer.use_critic else "critic"
        if not self._balances():
            self._batch = self._rows_of(batch)
            self._log_lengths(metrics, logging_prefix, np.arange(len(batch)), self.dp_size(stage))
            return batch
        batch.reorder(neutral_order(batch))
        self._batch = self._rows_of(batch)
        plan = self._plan(stage)
        seconds = time.perf_counter() - started
        self._log_lengths(metrics, logging_prefix, plan.order, plan.dp_size)
        metrics.update(plan.metrics("equipoise/"))
        metrics["equipoise/plan_seconds"] = seconds
        self.recorder.write(
            step=int(self.trainer.global_steps),
            stage=stage,
            plan=plan,
            lengths=self._batch.lengths,
            is_padding=self._batch.is_padding,
            cost=self._batch.cost,
            seconds=seconds,
        )
        batch.reorder(plan.order.tolist())
        return batch

    def measure(
        self, original: Callable[..., Any], batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let verl balance and log what its order would cost, as far as the driver can tell."""
        batch = original(batch, metrics, *args, **kwargs)
        stage: Stage = "actor" if self._updates_actor() or not self.trainer.use_critic else "critic"
        found = self._rows_of(batch)
        settings = self.settings(stage)
        dp_size = self.dp_size(stage)
        rows = settings.mini_batch_rows or len(batch)
        cost = self.cost(found.lengths).reshape(dp_size, len(batch) // rows, -1)
        totals = cost.sum(axis=2)
        bound = np.maximum(totals.mean(axis=0), cost.max(axis=(0, 2))).sum()
        metrics["equipoise/rank_over_bound"] = float(totals.max(axis=0).sum() / bound) if bound else 1.0
        return batch

    def run(self, stage: Stage, original: Callable[..., Any], batch: Any, metrics: dict[str, Any]) -> Any:
        """Run one of verl's stages on the batch in the order of the stage's plan, with the plan in it."""
        known = self._batch
        if known is None or not known.same_rows(batch):
            # a custom trainer has filtered or replaced rows since they were balanced
            known = self._batch = self._rows_of(batch)
        data = self._message(stage, batch, metrics, known)
        if data is not None:
            batch.extra_info[_patches.WIRE_KEY] = data
        if data is not None and self._timed(stage):
            with _patches.caught_times(self.trainer.actor_rollout_wg) as times:
                result = original(batch, metrics=metrics)
            self._refit(times, metrics, known)
        else:
            result = original(batch, metrics=metrics)
        if result is not None and result.extra_info:
            result.extra_info.pop(_patches.WIRE_KEY, None)
        return result

    def _timed(self, stage: Stage) -> bool:
        return stage == "actor" and self.fit is not None and self._balances()

    def _refit(self, times: list[float], metrics: dict[str, Any], known: StepRows) -> None:
        """Take the times of the actor's update into the cost model of the next step."""
        assert self.fit is not None
        calls = measured_calls(times, self._plan("actor"), known.lengths, known.cost)
        metrics.update(self.fit.observe(calls, known.cost))

    def _message(self, stage: Stage, batch: Any, metrics: dict[str, Any], known: StepRows) -> bytes | None:
        """Reorder ``batch`` for the stage and return what its workers need to know; None for nothing."""
        started = time.perf_counter()
        settings = self.settings(stage)
        if not self._balances():
            if settings.mini_batch_rows is None or settings.shuffle or not known.is_padding.any():
                return None
            place = known.places(batch)
            steps = len(batch) // settings.mini_batch_rows
            wire = wire_of_counts(known.lengths[place], known.is_padding[place], self.dp_size(stage), steps)
            return encode(wire)
        if settings.shuffle:
            self._warn_once(
                f"{stage}.shuffle=True draws mini-batches in the workers, where no plan can follow: verl's"
                " micro-batches are used; set it to False to have them planned"
            )
            return None
        plan = self._plan(stage)
        at = {key: i for i, key in enumerate(batch.keys)}
        batch.reorder([at[known.keys[row]] for row in plan.order.tolist()])
        if stage == "critic":
            metrics.update(plan.metrics("equipoise/critic/"))
        way = (plan, self._timed(stage))
        if way not in known.wires:
            known.wires[way] = encode(wire_of(plan, known.lengths, timed=way[1]))
        metrics["equipoise/plan_seconds"] = metrics.get("equipoise/plan_seconds", 0.0) + time.perf_counter() - started
        return known.wires[way]

    def _plan(self, stage: Stage) -> StepPlan:
        """The stage's plan of the present rows; stages with equal settings share one."""
        assert self._batch is not None
        settings = self.settings(stage)
        spec = settings.spec(self.config, dp_size=self.dp_size(stage), rows=self._batch.lengths.size)
        if isinstance(self._batch.cost, FittedCost):
            spec = replace(spec, micro_batch_overhead=self._batch.cost.per_call)
        plan = self._batch.plans.get(spec)
        if plan is None:
            try:
                plan = plan_step(self._batch.lengths, spec, cost=self._batch.cost, is_padding=self._batch.is_padding)
            except InvalidInput as error:
                longest = self._batch.keys[int(self._batch.lengths.argmax())]
                raise InfeasiblePlan(
                    f"step {self.trainer.global_steps}, {stage} ({settings.cap_key}), longest row {longest}: {error}"
                ) from error
            self._batch.plans[spec] = plan
        return plan

    def _rows_of(self, batch: Any) -> StepRows:
        return StepRows(batch, self.cost if self.fit is None else self.fit.cost)

    def _pad(self, batch: Any) -> Any:
        if len(batch) == 0:
            raise InvalidInput(must("the batch", "hold at least one row", 0, "check the replay buffer and its filters"))
        verl = self.trainer.config
        sizes: list[int] = []
        others = [self.dp_size(stage) for stage in self.stages()]
        updates: tuple[Stage, ...] = ("critic", "actor")
        for stage in updates:
            if (stage == "critic" and not self.trainer.use_critic) or (stage == "actor" and not self._updates_actor()):
                continue
            rows = self.settings(stage).mini_batch_rows
            if rows is not None:
                sizes.append(rows)
        multiple = math.lcm(required_batch_multiple(self.dp_size("actor"), sizes), *others)
        return _patches.pad_rows(
            batch, multiple, self.trainer.tokenizer.eos_token_id, least_row_tokens(self.config, verl)
        )

    def _log_lengths(self, metrics: dict[str, Any], prefix: str, order: IntArray, dp_size: int) -> None:
        from verl.utils.seqlen_balancing import log_seqlen_unbalance

        assert self._batch is not None
        shares = np.array_split(order, dp_size)
        metrics.update(
            log_seqlen_unbalance(
                seqlen_list=self._batch.lengths.tolist(), partitions=[s.tolist() for s in shares], prefix=prefix
            )
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("equipoise: %s", text)
