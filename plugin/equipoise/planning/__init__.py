"""From lengths to a plan: costs of rows, one level of balancing, and the whole step. Numpy only."""
