"""From a plan to gradients: rows of tensors, losses with global denominators, and engines that run micro-batches."""
