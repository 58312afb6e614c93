"""How requests move between ranks: their state, its transport, and the agreement that it arrived."""

from equipoise.rollout.transfer.state import EngineFacts as EngineFacts
from equipoise.rollout.transfer.state import KVLayout as KVLayout
from equipoise.rollout.transfer.state import MovableEngine as MovableEngine
from equipoise.rollout.transfer.state import RequestState as RequestState
from equipoise.rollout.transfer.state import Sampling as Sampling
from equipoise.rollout.transfer.state import SteppingEngine as SteppingEngine
from equipoise.rollout.transfer.state import StepReport as StepReport

__all__ = [
    "EngineFacts",
    "KVLayout",
    "MovableEngine",
    "RequestState",
    "Sampling",
    "StepReport",
    "SteppingEngine",
]
