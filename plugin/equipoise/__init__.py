"""Even work on every rank, the same loss on any cluster."""
