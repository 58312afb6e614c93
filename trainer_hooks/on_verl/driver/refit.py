"""Refit the cost model online: micro-batch times in, the cost model of the next step out. Numpy only.

Which rows explain a time. If ranks synchronize in every micro-batch (FSDP gathers each layer's parameters from all
ranks), a rank's micro-batch time includes its waiting, so all ranks report nearly the time of the slowest. Hence a
column (the micro-batches of all ranks with one index) is one call: its largest time, explained by the rows of its
costliest rank under the current model. The clock cannot tell which rank was the slowest; the model can: any law that
grows with ΣL and ΣL² names the same rank, unless two are nearly equal, and then either explains the time. If ranks
synchronize once per optimizer step (``objective="rank"``), each rank's micro-batch is a call with its own time, except
in the last column, where all wait for the rank with the most work: only that rank's counts.

Left out: the first update (allocations, compilation, lazy initialization), and updates in which the workers did not run
the plan. Passes and the critic's update are not measured; they are planned with the actor's fit, since a plan depends
only on the ratios of the coefficients, which a forward pass shares with its backward, and a critic with an actor of
the same shape.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.planning.step import StepPlan
from equipoise.planning.workload import CostModel, FittedCost

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MIN_CALLS = 10
"""Calls needed for a robust fit of three coefficients."""
_ALIKE = 1e-3  # smallest ÷ largest singular value below which calls do not distinguish the coefficients


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredCall:
    """One forward and backward.

    Attributes:
        lengths: tokens of its rows.
        seconds: measured time.
    """

    lengths: IntArray
    seconds: float


def split_times(times: Sequence[float], plan: StepPlan) -> list[tuple[int, FloatArray]] | None:
    """The workers' times as (mini-batch, seconds of shape (dp_size, micro-batches)), in execution order.

    Args:
        times: for each mini-batch that ran, for each rank: the index of the mini-batch, then the seconds of its
            micro-batches.
        plan: the plan they should have run.

    Returns:
        None unless every mini-batch of the plan was measured, equally often, on all ranks.
    """
    found: list[tuple[int, FloatArray]] = []
    at = 0
    while at < len(times):
        step = int(times[at])
        if not 0 <= step < plan.num_mini_batches:
            return None
        width = 1 + plan.sizes[step].shape[1]
        block = np.asarray(times[at : at + plan.dp_size * width], dtype=np.float64)
        if block.size != plan.dp_size * width or (block[::width] != step).any():
            return None
        found.append((step, block.reshape(plan.dp_size, width)[:, 1:]))
        at += block.size
    often = Counter(step for step, _ in found)
    if len(often) != plan.num_mini_batches or len(set(often.values())) != 1:
        return None
    return found


def measured_calls(
    times: Sequence[float], plan: StepPlan, lengths: IntArray, cost: CostModel
) -> list[MeasuredCall] | None:
    """The calls of an update; None if the workers did not run the plan.

    Args:
        times: see :func:`split_times`.
        plan: of the update.
        lengths: tokens of each row, shape (n,), in the plan's numbering.
        cost: determines the costliest rank.
    """
    found = split_times(times, plan)
    if found is None:
        return None
    costs = cost(lengths)
    micro_batches = [plan.micro_batches(rank) for rank in range(plan.dp_size)]
    calls: list[MeasuredCall] = []
    for step, seconds in found:
        rows = [rank[step] for rank in micro_batches]
        loads = np.array([[costs[micro].sum() for micro in rank] for rank in rows])
        for rank, column, time_s in _explained_times(seconds, loads, meet=plan.spec.objective == "lockstep"):
            calls.append(MeasuredCall(lengths=lengths[rows[rank][column]], seconds=time_s))
    usable = all(np.isfinite(call.seconds) and call.seconds > 0 for call in calls)
    return calls if usable else None


def _explained_times(seconds: FloatArray, loads: FloatArray, *, meet: bool) -> list[tuple[int, int, float]]:
    """(rank, column, seconds) of the calls of a mini-batch; ``seconds`` and ``loads`` have shape (dp_size, columns)."""
    ranks, columns = seconds.shape
    if meet:
        return [(int(loads[:, c].argmax()), c, float(seconds[:, c].max())) for c in range(columns)]
    own = [(r, c, float(seconds[r, c])) for c in range(columns - 1) for r in range(ranks)]
    last = int(loads.sum(axis=1).argmax())
    return [*own, (last, columns - 1, float(seconds[last, -1]))]


def relative_error(calls: Sequence[MeasuredCall], cost: CostModel, earlier: Sequence[MeasuredCall]) -> float | None:
    """Median over ``calls`` of abs(predicted - measured) / measured.

    A fitted model predicts seconds. The unit of any other is calibrated on ``earlier`` calls (the median); None if
    there are none.
    """
    if not calls:
        return None
    measured = np.array([call.seconds for call in calls])
    if isinstance(cost, FittedCost):
        predicted = np.array([cost.seconds(call.lengths) for call in calls])
    elif earlier:
        unit = np.median([call.seconds / float(cost(call.lengths).sum()) for call in earlier])
        predicted = unit * np.array([float(cost(call.lengths).sum()) for call in calls])
    else:
        return None
    return float(np.median(np.abs(predicted - measured) / measured))


class OnlineFit:
    """The cost model of a run, refitted after each update.

    Args:
        fallback: cost model until there are enough calls, and whenever the fit is poor.
        window: number of updates whose calls are kept.
        min_r2: minimum r² for the fit to be used.
        warn: called with a message, once per kind of reason not to use the fit.
    """

    def __init__(
        self, fallback: CostModel, *, window: int, min_r2: float, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self.fallback = fallback
        self.min_r2 = min_r2
        self.cost: CostModel = fallback
        """Cost model of the next step."""
        self._updates: deque[list[MeasuredCall]] = deque(maxlen=window)
        self._warmed_up = False
        self._warn = warn
        self._warned: set[str] = set()

    def observe(self, calls: list[MeasuredCall] | None, planned_with: CostModel) -> dict[str, float]:
        """Record an update, and refit.

        Args:
            calls: of the update; None if it could not be measured.
            planned_with: cost model of its plan.

        Returns:
            Flat metrics for a tracker: ``calls`` in the window; ``r2`` of the new fit; ``error``, the median relative
            error of the model that this update was planned with; ``used``, 1 if that was a fit, else 0.
        """
        figures = {"equipoise/fit/used": float(isinstance(planned_with, FittedCost))}
        earlier = self._calls()
        if calls is None:
            self._say_once(
                "missing",
                "the workers sent no times for the planned micro-batches (they fell back to verl's splitting, or the"
                " engine iterates micro-batches differently): the fit ignores this update",
            )
        elif self._warmed_up:
            error = relative_error(calls, planned_with, earlier)
            if error is not None:
                figures["equipoise/fit/error"] = error
            self._updates.append(calls)
        self._warmed_up = True
        known = self._calls()
        figures["equipoise/fit/calls"] = float(len(known))
        self.cost = self.fallback
        if len(known) < MIN_CALLS:
            if len(self._updates) == self._updates.maxlen:
                self._say_once("few", f"{len(known)} calls in {len(self._updates)} updates; raise equipoise.fit_window")
            return figures
        fit = FittedCost.fit([call.lengths for call in known], [call.seconds for call in known])
        figures["equipoise/fit/r2"] = fit.r2
        kind, why = doubts(fit, known, self.min_r2)
        if why:
            self._say_once(kind, why)
        else:
            self.cost = fit
        return figures

    def _calls(self) -> list[MeasuredCall]:
        return [call for update in self._updates for call in update]

    def _say_once(self, kind: str, why: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(f"cost=fitted uses the model's cost for now: {why}")


def doubts(fit: FittedCost, calls: Sequence[MeasuredCall], min_r2: float) -> tuple[str, str]:
    """Kind and text of the reason not to plan with ``fit``; two empty strings if there is none.

    The cap fills micro-batches to similar token counts, so the fixed time of a call and the time of its tokens are hard
    to tell apart. A linear coefficient below twice its standard error (estimated from the residuals' median) is
    treated as noise.
    """
    features = np.array([[1.0, call.lengths.sum(), (call.lengths.astype(np.float64) ** 2).sum()] for call in calls])
    size: FloatArray = np.linalg.norm(features, axis=0)
    scaled: FloatArray = features / size
    values = np.linalg.svd(scaled, compute_uv=False)
    if values[-1] < _ALIKE * values[0]:
        return "alike", "the measured calls are too similar to separate the time of a token, a call and a token pair"
    if not fit.r2 >= min_r2:
        return "poor", f"r² of the fit is {fit.r2:.2f}, below equipoise.fit_min_r2={min_r2}"
    left = np.abs(features @ [fit.per_call, fit.linear, fit.quadratic] - [call.seconds for call in calls])
    inverse = np.linalg.inv(np.asarray(scaled.T @ scaled, dtype=np.float64))
    error = float(np.median(left)) / 0.6745 * float(inverse[1, 1]) ** 0.5 / float(size[1])
    if fit.linear <= 2 * error:
        return (
            "degenerate",
            f"time per token, {fit.linear:.2e} s, is within twice its standard error, {error:.2e} s",
        )
    return "", ""
