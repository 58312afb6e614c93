"""In the process that runs verl's trainer: plan each step, pad and reorder its batch, send the plan to the workers."""
