"""Prompts from reasoning-gym as the parquet that verl reads: ``python -m examples.main_job.sums FILE SIZE SEED``.

The task is one that a chat model of 135 million parameters solves now and then when it answers freely, so that a group
of four samples often holds both right and wrong answers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# reasoning-gym and pandas are typed in part only.

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

TASK = "basic_arithmetic"
SETTINGS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}
SYSTEM = "You are a calculator."  # shorter than the model's own, and responses differ more in length


def row(entry: dict[str, Any], index: int) -> dict[str, Any]:
    """One entry of the task as a row of verl's data."""
    return {
        "data_source": f"reasoning_gym/{TASK}",
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": entry["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"index": index},
    }


def write(path: Path, *, size: int, seed: int) -> None:
    """Write ``size`` prompts; the same seed gives the same file."""
    import pandas as pd
    import reasoning_gym

    entries = reasoning_gym.create_dataset(TASK, size=size, seed=seed, **SETTINGS)
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([row(entries[index], index) for index in range(size)]).to_parquet(path)


if __name__ == "__main__":
    write(Path(sys.argv[1]), size=int(sys.argv[2]), seed=int(sys.argv[3]))
