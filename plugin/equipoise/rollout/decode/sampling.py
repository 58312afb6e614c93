"""One token from one row of logits, independent of other rows and of earlier samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from equipoise.rollout.transfer.state import Sampling


def uniform(seed: int, position: int) -> float:
    """The number of ``seed`` at ``position``, in [0, 1): Philox 4×64 (Salmon et al., SC 2011) with the seed as key.

    >>> uniform(7, 3) == uniform(7, 3), uniform(7, 3) == uniform(7, 4)
    (True, False)
    """
    return float(int(np.random.Philox(key=seed, counter=position).random_raw()) >> 11) * 2.0**-53


def draw(logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, float]:
    r"""The next token and its log-prob.

    The log-prob is that of :math:`\operatorname{softmax}(z / T)`, with logits :math:`z` after penalties and temperature
    :math:`T` (1 if it is 0), before ``top_k`` and ``top_p``, as a trainer recomputes it.

    Args:
        logits: (vocabulary,), on the CPU; any float dtype, computed in float64.
        sampling: settings.
        prompt: token ids.
        output: token ids so far; their number selects the random number.
    """
    wide = _penalised(logits.to(torch.float64, copy=True), sampling, prompt, output)
    scaled = wide / sampling.temperature if sampling.temperature > 0 else wide
    log_probs = torch.log_softmax(scaled, dim=-1)
    if sampling.temperature == 0:
        token = int(torch.argmax(scaled))
    else:
        token = _invert(log_probs.exp(), sampling, uniform(sampling.seed, len(output)))
    return token, float(log_probs[token])


def _invert(probs: torch.Tensor, sampling: Sampling, number: float) -> int:
    """The token whose interval of the cumulative probability contains ``number``."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        order, kept = None, probs
    else:
        kept, order = torch.sort(probs, descending=True, stable=True)
        if sampling.top_k:
            kept, order = kept[: sampling.top_k], order[: sampling.top_k]
        if sampling.top_p < 1:
            before = torch.cumsum(kept, 0) - kept
            kept = kept[before < sampling.top_p * float(kept.sum())]
    cumulated = torch.cumsum(kept, 0)
    place = int(torch.searchsorted(cumulated, number * float(cumulated[-1]), right=True))
    place = min(place, kept.numel() - 1)
    return place if order is None else int(order[place])


def _penalised(logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}))
        kept = logits[seen]
        factor = sampling.repetition_penalty
        logits[seen] = torch.where(kept > 0, kept / factor, kept * factor)
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        times = Counter(output)
        for token in sorted(times):
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * times[token]
    return logits
