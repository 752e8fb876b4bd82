"""When a run is saved and evaluated: by steps and by time, and checkpoints that are kept for good.

Steps count in all processes alike. Time counts in process 0, whose wish the others learn by an
agreement before the next step.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

from examples.trainer.runs.processes import is_first
from examples.trainer.runs.speed import DURATION


class Clock:
    """Wants something so many minutes after the last time; never with 0 minutes."""

    def __init__(self, minutes: float, gone: float = 0.0):
        """`gone` seconds of the first minutes are over already."""
        self.seconds = 60 * minutes
        self.since = time.monotonic() - gone
        self.asked = False

    def asks(self) -> bool:
        """Whether this process wants it, by its clock; true once until the clock is restarted."""
        due = self.seconds > 0 and time.monotonic() - self.since >= self.seconds
        if self.asked or not due or not is_first():
            return False
        self.asked = True
        return True

    def restart(self) -> None:
        self.since, self.asked = time.monotonic(), False


class SaveTimes:
    """Says at which steps to save."""

    def __init__(self, every: int, keep_every: int, minutes: float, step: int):
        self.every = every
        self.keep_every = keep_every
        self.clock = Clock(minutes)
        self.last = step
        """The last step that was saved."""

    def is_due(self, step: int, wanted: bool) -> bool:
        """Whether to save this step; `wanted` is what the processes have agreed on."""
        kept = self.keep_every > 0 and step % self.keep_every == 0
        return wanted or kept or step % self.every == 0

    def saved(self, step: int) -> None:
        self.last = step
        self.clock.restart()


class EvaluationTimes:
    """Says at which steps to evaluate."""

    def __init__(
        self, every: int, steps: int, minutes: float, records: Sequence[dict[str, Any]] = ()
    ):
        """The time goes on from the last evaluation in `records`, those of the run so far."""
        self.every = every
        self.steps = steps
        self.clock = Clock(minutes, seconds_since_evaluation(records))

    def is_due(self, step: int, wanted: bool) -> bool:
        """Whether to evaluate after this step; `wanted` is what the processes have agreed on."""
        return wanted or step == self.steps or step % self.every == 0


def seconds_since_evaluation(records: Sequence[dict[str, Any]]) -> float:
    """Seconds of the steps after the last evaluation, as far as they were measured."""
    at = [i for i, record in enumerate(records) if "val_loss" in record]
    after = records[at[-1] + 1 :] if at else records
    return math.fsum(record.get(DURATION, 0.0) for record in after)
