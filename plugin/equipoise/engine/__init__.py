"""Engines that run a plan: forward, loss and backward of micro-batches, by name from a registry."""

from equipoise.engine.base import BaseEngine, EngineOutput, LossFunction, PassOptions
from equipoise.engine.config import EngineConfig, OptimizerConfig
from equipoise.engine.microbatches import MicroBatches, prepare_micro_batches
from equipoise.engine.registry import EngineRegistry, MissingPackage, engines

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
