"""Expected lengths of responses, also before any response has finished."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate

from cachetools import LRUCache

from equipoise.rollout.policy.lengths import LengthModel

_RECENT = 512  # most recent responses of the run, over all prompts
_OF_PROMPT = 16  # most recent responses of one prompt
_SHARE_OF_LIMIT = 4  # long-tailed lengths average about a quarter of their limit


class ExpectedLengths:
    """Expected lengths of responses that have not started, and remaining lengths of running ones.

    For a response that has not started, the expectation is that of
    :class:`~equipoise.rollout.policy.lengths.LengthModel` if its prompt was answered before, else the mean of the run's
    recent responses, and before any has finished a quarter of the limit. For a running response, it is the mean of what
    longer responses had left at its current length: those of its prompt or, if there are none, of the run. The model's
    own expectation does not depend on a response's progress, while a router compares requests that started alike.

    Args:
        limit: maximum tokens of a response.
        max_prompts: maximum prompts remembered; the least recently used one is evicted first.

    >>> lengths = ExpectedLengths(limit=400, max_prompts=1000)
    >>> lengths.of_new("a")
    100.0
    >>> lengths.finish("b", 40)
    >>> lengths.of_new("a")
    40.0
    """

    def __init__(self, *, limit: int, max_prompts: int) -> None:
        self.limit = limit
        self._model = LengthModel(max_prompts=max_prompts)
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._sum = 0
        self._known: LRUCache[Hashable, deque[int]] = LRUCache(max_prompts)
        self._new: LRUCache[Hashable, float] = LRUCache(max_prompts)

    @property
    def mean(self) -> float:
        """Mean length of the run's recent responses."""
        return self._sum / len(self._recent) if self._recent else max(1.0, self.limit / _SHARE_OF_LIMIT)

    def finish(self, prompt: Hashable, length: int) -> None:
        """Note the length of a finished response."""
        self._model.finish(prompt, length)
        self._known.setdefault(prompt, deque(maxlen=_OF_PROMPT)).append(length)
        self._new.pop(prompt, None)
        if len(self._recent) == _RECENT:
            self._sum -= self._recent[0]
        self._recent.append(length)
        self._sum += length

    def next_rollout(self) -> None:
        """Start a new rollout: what has finished becomes history."""
        self._model.next_rollout()
        self._new.clear()

    def of_new(self, prompt: Hashable) -> float:
        """Return the expected tokens of a response that has not started."""
        if prompt not in self._known:
            return min(self.mean, float(self.limit))
        if prompt not in self._new:
            self._new[prompt] = min(float(self._model.expect([prompt], [0])[0]), float(self.limit))
        return self._new[prompt]

    def remaining(self, prompts: Sequence[Hashable], generated: Sequence[int]) -> list[float]:
        """Return the expected remaining tokens of running requests, each at least 1."""
        recent = sorted(self._recent)
        totals = [0, *accumulate(recent)]
        expected: list[float] = []
        for prompt, done in zip(prompts, generated, strict=True):
            left = _mean_rest(self._known.get(prompt, ()), done)
            if left is None:
                at = bisect_right(recent, done)
                longer = len(recent) - at
                # longer than any so far: half of its length, the least that a long-tailed distribution gives
                left = (totals[-1] - totals[at]) / longer - done if longer else max(self.mean, done / 2)
            expected.append(max(1.0, min(left, float(self.limit - done))))
        return expected


def _mean_rest(lengths: Iterable[int], done: int) -> float | None:
    rest = [length - done for length in lengths if length > done]
    return sum(rest) / len(rest) if rest else None
