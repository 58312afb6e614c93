"""In verl's training workers: run the micro-batches of the plan that a batch carries."""
