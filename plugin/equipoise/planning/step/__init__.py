"""The plan of a step: which row goes to which mini-batch, rank and micro-batch. Start with ``step``."""

from equipoise.planning.step.multiple import padded_batch_size, required_batch_multiple
from equipoise.planning.step.result import PlanStats, StepPlan
from equipoise.planning.step.spec import StepSpec
from equipoise.planning.step.step import plan_step

__all__ = ["PlanStats", "StepPlan", "StepSpec", "padded_batch_size", "plan_step", "required_batch_multiple"]
