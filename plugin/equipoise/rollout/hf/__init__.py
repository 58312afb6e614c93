"""A decode engine over HF causal language models; start with :mod:`equipoise.rollout.hf.engine`."""

from equipoise.rollout.hf.engine import DecodeConfig as DecodeConfig
from equipoise.rollout.hf.engine import DecodeEngine as DecodeEngine

__all__ = ["DecodeConfig", "DecodeEngine"]
