"""Pad, plan and reorder the batch of a step, and send each update and pass its plan."""

# verl is not typed; what comes from it is checked before use.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from equipoise.config import EquipoiseConfig
from equipoise.errors import InfeasiblePlan, InvalidInput, must
from equipoise.planning.step import StepPlan, plan_step
from equipoise.planning.workload import FittedCost
from equipoise.trainer_hooks.on_verl import _patches
from equipoise.trainer_hooks.on_verl.driver.checks import check_stages
from equipoise.trainer_hooks.on_verl.driver.figures import length_figures, rank_over_bound
from equipoise.trainer_hooks.on_verl.driver.padding import batch_multiple, pad_to_multiple
from equipoise.trainer_hooks.on_verl.driver.record import Recorder
from equipoise.trainer_hooks.on_verl.driver.refit import OnlineFit, measured_calls
from equipoise.trainer_hooks.on_verl.driver.rows import StepRows, neutral_order
from equipoise.trainer_hooks.on_verl.driver.settings import Stage, cost_model, least_row_tokens
from equipoise.trainer_hooks.on_verl.driver.stages import TrainerStages
from equipoise.trainer_hooks.on_verl.wire import encode, wire_of, wire_of_counts

logger = logging.getLogger("equipoise")


class StepPlanner:
    """Plans the steps of one trainer.

    Args:
        trainer: a verl v1 ``PPOTrainer``, constructed.
        config: the checked node.
    """

    def __init__(self, trainer: Any, config: EquipoiseConfig) -> None:
        self.trainer = trainer
        self.stages = TrainerStages(trainer)
        self.config = config
        self.cost = cost_model(config, trainer.config)
        self.fit: OnlineFit | None = None
        if config.cost == "fitted":
            self.fit = OnlineFit(self.cost, window=config.fit_window, min_r2=config.fit_min_r2, warn=self._warn_once)
        self.recorder = Recorder(config.record)
        self._batch: StepRows | None = None
        self._warned: set[str] = set()

    def check(self) -> None:
        """Check the settings that are known once verl is set up; see :func:`.checks.check_stages`."""
        check_stages(self.stages, self._warn_once)

    def balance(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        """Replace verl's ``_balance_batch``: pad, plan the next update, reorder."""
        del keep_minibatch  # verl's v1 trainer ignores it; here each mini-batch is planned separately
        started = time.perf_counter()
        batch = self._pad(batch)
        stage = self.stages.planned_update()
        if not self.stages.balances():
            self._batch = found = self._rows_of(batch)
            shares = np.array_split(np.arange(len(batch)), self.stages.dp_size(stage))
            metrics.update(length_figures(found.lengths, shares, logging_prefix))
            return batch
        batch.reorder(neutral_order(batch))
        self._batch = found = self._rows_of(batch)
        plan = self._plan(stage)
        seconds = time.perf_counter() - started
        metrics.update(length_figures(found.lengths, np.array_split(plan.order, plan.dp_size), logging_prefix))
        metrics.update(plan.metrics("equipoise/"))
        metrics["equipoise/plan_seconds"] = seconds
        self.recorder.write(
            step=int(self.trainer.global_steps),
            stage=stage,
            plan=plan,
            lengths=found.lengths,
            is_padding=found.is_padding,
            cost=found.cost,
            seconds=seconds,
        )
        batch.reorder(plan.order.tolist())
        return batch

    def measure(
        self, original: Callable[..., Any], batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let verl balance, and log what its order would cost, as far as the driver can tell."""
        batch = original(batch, metrics, *args, **kwargs)
        stage = self.stages.planned_update()
        cost = self.cost(self._rows_of(batch).lengths)
        steps = len(batch) // (self.stages.settings(stage).mini_batch_rows or len(batch))
        metrics["equipoise/rank_over_bound"] = rank_over_bound(cost, self.stages.dp_size(stage), steps)
        return batch

    def run(self, stage: Stage, original: Callable[..., Any], batch: Any, metrics: dict[str, Any]) -> Any:
        """Run one of verl's stages on the batch in the order of the stage's plan, with the plan in it."""
        known = self._batch
        if known is None or not known.same_rows(batch):
            # a custom trainer has filtered or replaced rows after balancing
            known = self._batch = self._rows_of(batch)
        data = self._message(stage, batch, metrics, known)
        if data is not None:
            batch.extra_info[_patches.WIRE_KEY] = data
        if self.config.loss == "exact":
            batch.extra_info[_patches.EXACT_KEY] = True
        if data is not None and self._timed(stage):
            with _patches.caught_times(self.trainer.actor_rollout_wg) as times:
                result = original(batch, metrics=metrics)
            self._refit(times, metrics, known)
        else:
            result = original(batch, metrics=metrics)
        if result is not None and result.extra_info:
            for key in (_patches.WIRE_KEY, _patches.EXACT_KEY):
                result.extra_info.pop(key, None)
        return result

    def _timed(self, stage: Stage) -> bool:
        return stage == "actor" and self.fit is not None and self.stages.balances()

    def _refit(self, times: list[float], metrics: dict[str, Any], known: StepRows) -> None:
        """Update the cost model of the next step with the times of the actor's update."""
        assert self.fit is not None
        calls = measured_calls(times, self._plan("actor"), known.lengths, known.cost)
        metrics.update(self.fit.observe(calls, known.cost))

    def _message(self, stage: Stage, batch: Any, metrics: dict[str, Any], known: StepRows) -> bytes | None:
        """Reorder ``batch`` for the stage and return the message for its workers; None if they need none."""
        started = time.perf_counter()
        settings = self.stages.settings(stage)
        if settings.shuffle and self.stages.balances():
            self._warn_once(
                f"{stage}.shuffle=True draws mini-batches in the workers, beyond any plan: verl's"
                " micro-batches are used; set it to False to have them planned"
            )
        if settings.shuffle or not self.stages.balances():
            if settings.mini_batch_rows is None or not known.is_padding.any():
                return None
            place = known.places(batch)
            steps = len(batch) // settings.mini_batch_rows
            dp_size = self.stages.dp_size(stage)
            return encode(wire_of_counts(known.lengths[place], known.is_padding[place], dp_size, steps))
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
        """The stage's plan of the current rows; stages with equal settings share one."""
        assert self._batch is not None
        settings = self.stages.settings(stage)
        spec = settings.spec(self.config, dp_size=self.stages.dp_size(stage), rows=self._batch.lengths.size)
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
        return pad_to_multiple(
            batch,
            batch_multiple(self.stages),
            eos_token_id=self.trainer.tokenizer.eos_token_id,
            row_tokens=least_row_tokens(self.config, self.trainer.config),
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("equipoise: %s", text)
