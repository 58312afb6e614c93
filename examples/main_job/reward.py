"""The reward that verl loads by this file's path: reasoning-gym's own score of the last number of a response."""

# pyright: reportUnknownMemberType=false
# reasoning-gym is typed in part only.

from __future__ import annotations

import functools
import re
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def answer(response: str) -> str:
    """Last number of a response, or nothing.

    >>> answer("First 3 + 4. So the answer is 1,007.")
    '1007'
    """
    found = _NUMBER.findall(response)
    return found[-1].replace(",", "") if found else ""


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> dict[str, float]:
    """Score of one response; the arguments are verl's."""
    score = float(_task(data_source).score_answer(answer(solution_str), {"answer": ground_truth}))
    return {"score": score, "acc": float(score == 1.0)}


@functools.cache
def _task(name: str) -> Any:
    """The data set of that name; scoring needs its rules, not its entries."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name.removeprefix("reasoning_gym/"), size=1, seed=0)
