"""One level: weights into k parts, rows into capped bins. Numpy only."""

from equipoise.partition.divide import Partitioner, partition, partitioners

__all__ = ["Partitioner", "partition", "partitioners"]
