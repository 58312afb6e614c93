"""Losses that are the same on any cluster: sums over a rank's tokens, divided once by global counts."""

from equipoise.loss.aggregation import LossDenominators, agg_loss

__all__ = ["LossDenominators", "agg_loss"]
