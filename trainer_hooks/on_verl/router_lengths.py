"""Expected lengths of responses, as a router needs them: also before anything has finished."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate

from equipoise.rollout.policy.lengths import LengthModel

_RECENT = 512  # responses of the run that are remembered
_OF_PROMPT = 16  # and of one prompt
_SHARE_OF_LIMIT = 4  # long-tailed responses have a mean of about a quarter of their limit


class ExpectedLengths:
    """Of responses that have not started, and of those that run.

    Before it starts, a response is expected as :class:`~equipoise.rollout.policy.lengths.LengthModel` says, if its
    prompt was answered before; else to be as long as the run's last responses, and before the first of these a
    quarter of the limit. While it runs, what it has still to go is the mean of what longer responses had to go from
    there: those of its prompt, or, if there are none, of the run; a router compares requests that were alike when
    they came, and for that a mean that forgets how far they are is not enough.

    Args:
        limit: tokens of a response at most.

    >>> lengths = ExpectedLengths(limit=400)
    >>> lengths.of_new("a")
    100.0
    >>> lengths.finish("b", 40)
    >>> lengths.of_new("a")
    40.0
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._model = LengthModel()
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._sum = 0
        self._known: dict[Hashable, deque[int]] = {}
        self._new: dict[Hashable, float] = {}

    @property
    def mean(self) -> float:
        """Of the run's last responses."""
        return self._sum / len(self._recent) if self._recent else max(1.0, self.limit / _SHARE_OF_LIMIT)

    def finish(self, prompt: Hashable, length: int) -> None:
        """Take note of a response that is done."""
        self._model.finish(prompt, length)
        self._known.setdefault(prompt, deque(maxlen=_OF_PROMPT)).append(length)
        self._new.pop(prompt, None)
        if len(self._recent) == _RECENT:
            self._sum -= self._recent[0]
        self._recent.append(length)
        self._sum += length

    def next_rollout(self) -> None:
        """Start a new rollout: what finished becomes history."""
        self._model.next_rollout()
        self._new.clear()

    def of_new(self, prompt: Hashable) -> float:
        """Expected tokens of a response that has not started."""
        if prompt not in self._known:
            return min(self.mean, float(self.limit))
        if prompt not in self._new:
            self._new[prompt] = min(float(self._model.expect([prompt], [0])[0]), float(self.limit))
        return self._new[prompt]

    def remaining(self, prompts: Sequence[Hashable], generated: Sequence[int]) -> list[float]:
        """Expected tokens that the running requests have still to go, each at least 1."""
        recent = sorted(self._recent)
        totals = [0, *accumulate(recent)]
        expected: list[float] = []
        for prompt, done in zip(prompts, generated, strict=True):
            left = _mean_rest(self._known.get(prompt, ()), done)
            if left is None:
                at = bisect_right(recent, done)
                longer = len(recent) - at
                # of a response that is longer than any so far: half of what it has, the least that a long tail gives
                left = (totals[-1] - totals[at]) / longer - done if longer else max(self.mean, done / 2)
            expected.append(max(1.0, min(left, float(self.limit - done))))
        return expected


def _mean_rest(lengths: Iterable[int], done: int) -> float | None:
    rest = [length - done for length in lengths if length > done]
    return sum(rest) / len(rest) if rest else None
