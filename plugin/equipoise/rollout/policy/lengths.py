"""Expected remaining length of a request, from siblings, earlier rollouts of its prompt, and all other requests."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from equipoise._arrays import FloatArray, IntArray, sums
from equipoise._checks import as_vector, is_amount, is_whole
from equipoise.errors import InvalidInput, must


class LengthModel:
    """Expected remaining tokens of running requests.

    The mean length of a prompt's responses is estimated from finished responses and from running ones, which will be at
    least as long as they are now: mean = (tokens of all + weight · prior) / (number finished + weight). This is the
    estimate for censored exponential lifetimes with a prior; as these are memoryless, the mean is also the expected
    remaining length. The prior is the running median of the prompt's earlier rollouts minus the tokens generated so
    far, or, for a new prompt, the same estimate over all prompts.

    Args:
        window: how many earlier responses of a prompt its running median covers.
        weight: how many responses the prior counts for, above 0.
        max_prompts: how many prompts to remember; the least recently used are forgotten.

    Source: B. Epstein, M. Sobel, Life testing, J. Am. Stat. Assoc. 48 (1953) 486-502.

    >>> model = LengthModel()
    >>> for length in (900, 1100):
    ...     model.finish("short", length)
    >>> model.expect(["short", "long", "long"], [1000, 1000, 1000]).round().tolist()
    [2000.0, 3500.0, 3500.0]
    """

    def __init__(self, *, window: int = 16, weight: float = 2.0, max_prompts: int = 65536) -> None:
        if not is_whole(window, 1):
            raise InvalidInput(must("window", "be at least 1", window, "pass how many responses the median spans"))
        if not is_amount(weight) or weight == 0:
            raise InvalidInput(must("weight", "be finite and above 0", weight, "pass how many responses it counts for"))
        if not is_whole(max_prompts, 1):
            raise InvalidInput(must("max_prompts", "be at least 1", max_prompts, "pass how many are remembered"))
        self._window = window
        self._weight = weight
        self._max_prompts = max_prompts
        self._history: OrderedDict[Hashable, deque[int]] = OrderedDict()
        self._finished: OrderedDict[Hashable, list[int]] = OrderedDict()

    def finish(self, prompt: Hashable, length: int) -> None:
        """Record a finished response of ``length`` tokens."""
        if not is_amount(length):
            raise InvalidInput(must("length", "be at least 0", length, "pass the tokens of the response"))
        _check_hashable([prompt])
        self._finished.setdefault(prompt, []).append(length)
        self._finished.move_to_end(prompt)
        self._use([prompt])
        self._forget(self._finished)

    def next_rollout(self) -> None:
        """Start a new rollout: finished responses become history."""
        for prompt, lengths in self._finished.items():
            self._history.setdefault(prompt, deque(maxlen=self._window)).extend(lengths)
            self._history.move_to_end(prompt)
        self._finished.clear()
        self._forget(self._history)

    def expect(self, prompts: Sequence[Hashable], generated: Any) -> FloatArray:
        """Expected remaining tokens of the running requests of all ranks, shape (n,).

        Args:
            prompts: prompt of each request, shape (n,).
            generated: tokens that each request has generated, shape (n,).

        Raises:
            InvalidInput: there is not one count per request, a count is negative, or a prompt is not hashable.
        """
        _check_hashable(prompts)
        tokens = as_vector("generated", generated, "pair prompts and counts")
        if tokens.shape != (len(prompts),) or (tokens.size and not (tokens.dtype.kind in "iuf" and tokens.min() >= 0)):
            rule = f"be a count of at least 0 for each of {len(prompts)} requests"
            raise InvalidInput(must("generated", rule, tokens.shape, "pair prompts and counts"))
        tokens = tokens.astype(np.float64)
        self._use(prompts)
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys([*self._finished, *prompts]))}
        index = np.array([number[prompt] for prompt in prompts], dtype=np.int64)
        finished = [(number[prompt], length) for prompt, lengths in self._finished.items() for length in lengths]
        medians = np.array([self._median(prompt) for prompt in number], dtype=np.float64)
        return expected_remaining(index, tokens, _columns(finished), medians, weight=self._weight)

    def _use(self, prompts: Sequence[Hashable]) -> None:
        for prompt in prompts:
            if prompt in self._history:
                self._history.move_to_end(prompt)

    def _forget(self, memory: OrderedDict[Hashable, Any]) -> None:
        while len(memory) > self._max_prompts:
            memory.popitem(last=False)

    def _median(self, prompt: Hashable) -> float:
        past = self._history.get(prompt)
        return median(past) if past else float("nan")


def expected_remaining(
    prompt: IntArray,
    generated: FloatArray,
    finished: tuple[IntArray, FloatArray],
    medians: FloatArray,
    *,
    weight: float = 2.0,
) -> FloatArray:
    """`LengthModel.expect` on arrays.

    Args:
        prompt: prompt index of each running request, shape (n,).
        generated: its tokens so far, shape (n,).
        finished: prompt and length of each finished response of this rollout, both of shape (m,).
        medians: median of each prompt's earlier responses, NaN if there are none, shape (prompts,).
        weight: how many responses the prior counts for.
    """
    prompts = medians.size
    exposure = sums(prompt, generated, prompts) + sums(finished[0], finished[1], prompts)
    done = np.bincount(finished[0], minlength=prompts).astype(np.float64)
    overall = (float(exposure.sum()) + 1.0) / max(float(done.sum()), 1.0)
    known = ~np.isnan(medians)
    still = np.maximum(np.where(known, medians, overall)[prompt] - np.where(known[prompt], generated, 0.0), 1.0)
    return (exposure[prompt] + weight * still) / (done[prompt] + weight)


def _check_hashable(prompts: Sequence[Hashable]) -> None:
    try:
        frozenset(prompts)
    except TypeError as error:
        remedy = "pass what names the prompt of each request"
        raise InvalidInput(must("prompts", "be a list of hashable names", prompts, remedy)) from error


def _columns(pairs: Iterable[tuple[int, int]]) -> tuple[IntArray, FloatArray]:
    table = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1].astype(np.float64)
