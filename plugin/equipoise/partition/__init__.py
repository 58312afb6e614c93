"""One level: weights into k parts, rows into capped groups. Numpy only."""

from equipoise.partition.divide import Partitioner, partition, partitioners
from equipoise.partition.pack import Packer, pack, pack_metrics, packers

__all__ = ["Packer", "Partitioner", "pack", "pack_metrics", "packers", "partition", "partitioners"]
