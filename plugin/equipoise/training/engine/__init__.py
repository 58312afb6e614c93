"""Engines that run a plan: forward, loss and backward for each micro-batch; found by name in a registry."""

from equipoise.training.engine.base import BaseEngine, EngineOutput, LossFunction, PassOptions
from equipoise.training.engine.config import EngineConfig, OptimizerConfig
from equipoise.training.engine.microbatches import MicroBatches, prepare_micro_batches
from equipoise.training.engine.registry import EngineRegistry, MissingPackage, engines

__all__ = [
    "BaseEngine",
    "EngineConfig",
    "EngineOutput",
    "EngineRegistry",
    "LossFunction",
    "MicroBatches",
    "MissingPackage",
    "OptimizerConfig",
    "PassOptions",
    "engines",
    "prepare_micro_batches",
]
