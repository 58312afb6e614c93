"""The plan of a step: which row goes to which mini-batch, rank and micro-batch. Read ``step`` first."""

from equipoise.plan.multiple import padded_batch_size, required_batch_multiple
from equipoise.plan.result import PlanStats, StepPlan
from equipoise.plan.spec import StepSpec
from equipoise.plan.step import plan_step

__all__ = ["PlanStats", "StepPlan", "StepSpec", "padded_batch_size", "plan_step", "required_batch_multiple"]
