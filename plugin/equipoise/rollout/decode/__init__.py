"""A decode engine over HF causal language models; start with :mod:`equipoise.rollout.decode.engine`."""

from equipoise.rollout.decode.config import DecodeConfig as DecodeConfig
from equipoise.rollout.decode.engine import DecodeEngine as DecodeEngine

__all__ = ["DecodeConfig", "DecodeEngine"]
