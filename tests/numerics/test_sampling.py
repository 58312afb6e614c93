"""Sampling: distributions, log-probs and random numbers."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from equipoise.rollout.decode.sampling import draw, uniform
from equipoise.rollout.transfer import Sampling


def _plain(logits: list[float], how: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Probabilities that a token is drawn with, in loops."""
    z = list(logits)
    for token in {*prompt, *output}:
        z[token] = z[token] / how.repetition_penalty if z[token] > 0 else z[token] * how.repetition_penalty
    for token, times in Counter(output).items():
        z[token] -= how.presence_penalty + how.frequency_penalty * times
    weights = [float(np.exp(x / how.temperature)) for x in z]
    order = sorted(range(len(z)), key=lambda token: -weights[token])
    if how.top_k:
        order = order[: how.top_k]
    total, kept, share = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if share >= how.top_p * total:
            break
        kept.append(token)
        share += weights[token]
    return [weights[token] / share if token in kept else 0.0 for token in range(len(z))]


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=3),
        Sampling(top_p=0.6),
        Sampling(top_k=5, top_p=0.8, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    ],
)
def test_tokens_are_drawn_as_often_as_plain_loops_say(how: Sampling) -> None:
    logits = torch.tensor([1.5, -0.5, 0.2, 2.0, -1.0, 0.9, 0.0, 1.1])
    prompt, output = [3, 1], [0, 5, 5]
    want = np.array(_plain(logits.tolist(), how, prompt, output))
    number = 2000
    found = Counter(draw(logits, replace(how, seed=seed), prompt, output)[0] for seed in range(number))
    counts = np.array([found[token] for token in range(8)])
    assert (counts[want == 0] == 0).all()
    kept = want > 0
    chi2 = float((((counts - number * want) ** 2)[kept] / (number * want)[kept]).sum())
    assert chi2 < 27, "0.1 % of draws are as far off with 8 outcomes"


def test_log_probs_are_those_before_the_cuts() -> None:
    logits = torch.tensor([1.5, -0.5, 0.2, 2.0])
    token, log_prob = draw(logits, Sampling(temperature=0.5, top_k=1), [0], [])
    assert token == 3
    assert log_prob == pytest.approx(4 - np.log(np.exp([3.0, -1.0, 0.4, 4.0]).sum()), abs=1e-7)


def test_random_numbers_are_those_of_seed_and_position_and_even() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(40) for position in range(40)])
    assert len(set(numbers.tolist())) == 1600
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / 1600) ** 0.5
    by_seed = numbers.reshape(40, 40)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.1
