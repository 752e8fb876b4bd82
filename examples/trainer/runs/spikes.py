"""Steps whose gradient is far larger than those of late: the bound, from the norms of the past."""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from examples.trainer.runs.speed import GRADIENT_NORM

WINDOW = 128  # steps that the bound is made from; without half of them there is none
BEHIND = 2  # a step is prepared while the one before it still runs, whose norm is not known


class Spikes:
    """Bounds the norm of the gradient of a step by the norms of the steps before it.

    The bound of step t is mean + `deviations` x standard deviation of the norms of the last 128
    steps up to step t - 2, also of those that were left out, so that a norm which rises for good is
    accepted after a while. This is the rule of OLMo's SkipStepOptimizer, for the norm alone
    (allenai/OLMo-core, src/olmo_core/optim/skip_step_optimizer.py). With `deviations` None there is
    no bound.
    """

    def __init__(self, deviations: float | None, records: Iterable[dict[str, Any]]):
        """`records` are those of the run so far."""
        self.deviations = deviations
        self.norms: deque[tuple[int, float]] = deque(maxlen=WINDOW + BEHIND)
        if deviations is not None:
            for record in records:
                self.add(record["step"], record.get(GRADIENT_NORM, math.nan))

    def add(self, step: int, norm: float) -> None:
        if math.isfinite(norm):
            self.norms.append((step, norm))

    def bound(self, step: int) -> float | None:
        """The largest norm that this step may have; None without this check."""
        if self.deviations is None:
            return None
        known = [norm for at, norm in self.norms if at <= step - BEHIND][-WINDOW:]
        if len(known) < WINDOW // 2:
            return math.inf
        return statistics.fmean(known) + self.deviations * statistics.stdev(known)
