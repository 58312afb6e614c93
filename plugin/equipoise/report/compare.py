"""Many rollouts with the same lengths, and a lower bound on their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise._arrays import FloatArray
from equipoise.report.policies import Contestant
from equipoise.report.setting import LengthLaw, Responses, Setting
from equipoise.report.simulation import Outcome, simulate


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Outcomes by contestant, one per seed, and each seed's lower bound in seconds."""

    setting: Setting
    law: LengthLaw
    outcomes: dict[str, list[Outcome]]
    bound_s: FloatArray

    def seconds(self, name: str) -> FloatArray:
        """Seconds for each seed."""
        return np.array([outcome.seconds for outcome in self.outcomes[name]])

    def kv_bytes(self, name: str) -> FloatArray:
        """KV bytes moved for each seed."""
        return np.array([outcome.kv_bytes for outcome in self.outcomes[name]], dtype=np.float64)


def compare(
    setting: Setting,
    law: LengthLaw,
    entered: Sequence[Contestant],
    seeds: Iterable[int],
    advance: Callable[[], None] = lambda: None,
) -> Comparison:
    """Simulate each contestant on each seed's lengths."""
    outcomes: dict[str, list[Outcome]] = {contestant.name: [] for contestant in entered}
    bounds: list[float] = []
    for seed in seeds:
        responses = law.draw(setting.num_ranks * setting.requests_per_rank, seed)
        bounds.append(bound_seconds(responses, setting))
        for contestant in entered:
            rank = contestant.place(responses, setting)
            outcomes[contestant.name].append(
                simulate(responses, rank, setting, contestant.policy, one_shape=contestant.one_shape)
            )
            advance()
    return Comparison(setting=setting, law=law, outcomes=outcomes, bound_s=np.array(bounds))


def bound_seconds(responses: Responses, setting: Setting) -> float:
    """Seconds if counts and KV tokens were even at every step, at no cost; NaN if requests have to wait.

    Moving requests cannot be faster: each step costs at least the smallest tier ≥ mean count.
    """
    if setting.places < setting.requests_per_rank:
        return float("nan")
    longest = int(responses.length.max())
    running = responses.length.size - np.cumsum(np.bincount(responses.length, minlength=longest))[:longest]
    prompts = np.bincount(responses.length, weights=responses.prompt_tokens, minlength=longest)
    held = float(responses.prompt_tokens.sum()) - np.cumsum(prompts)[:longest]
    tokens = (held + running * np.arange(longest)) / setting.num_ranks
    mean = -(-running // setting.num_ranks)
    return float(setting.step_time.of_tiers(np.searchsorted(setting.step_time.tiers, mean), tokens).sum())
