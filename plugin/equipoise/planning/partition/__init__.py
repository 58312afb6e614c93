"""One level of balancing: weights into k parts, rows into capped groups. Numpy only."""

from equipoise.planning.partition.divide import Partitioner, partition, partitioners
from equipoise.planning.partition.pack import Packer, pack, packers

__all__ = ["Packer", "Partitioner", "pack", "packers", "partition", "partitioners"]
