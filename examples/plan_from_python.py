"""Plan one step without any trainer: ``python -m examples.plan_from_python``."""

import numpy as np

import equipoise as eq

# 512 rows of one training step, as a chat model writes them: most are short, some are twenty times as long.
rng = np.random.default_rng(0)
lengths = np.clip(rng.lognormal(6.5, 1.0, size=512), 16, 8192).astype(int)

# Eight data-parallel ranks, four optimizer steps, at most 16,384 tokens in a micro-batch.
spec = eq.StepSpec(dp_size=8, num_mini_batches=4, max_token_len_per_gpu=16384)
plan = eq.plan_step(lengths, spec)

print(f"{len(lengths)} rows, {lengths.sum():,} tokens, the longest {lengths.max():,}")
print(f"cost where ranks meet at every micro-batch: {plan.stats.lockstep_cost / plan.stats.bound:.3f} of the bound")

# plan.order is the order to hand the rows out in: each rank takes the next eighth.
print(f"first rows of rank 0: {plan.order[:8].tolist()}")

# What one rank runs: micro-batches by optimizer step, as row numbers.
for number, mini_batch in enumerate(plan.micro_batches(rank=0)):
    tokens = [int(lengths[rows].sum()) for rows in mini_batch]
    print(f"rank 0, optimizer step {number}: micro-batches of {tokens} tokens")

# The same figures for a tracker, beside those of the batch as it came in.
for name, value in plan.metrics("balance/").items():
    print(f"{name:40} {value:.4g}")
