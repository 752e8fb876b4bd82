"""When a run is saved: by steps, by time, and checkpoints that are kept for good."""

import time

from examples.trainer.runs.processes import is_first


class SaveTimes:
    """Says at which steps to save.

    Steps count in all processes alike; time counts in process 0, whose wish the others learn by an
    agreement before the next step.
    """

    def __init__(self, every: int, keep_every: int, minutes: float, step: int):
        self.every = every
        self.keep_every = keep_every
        self.seconds = 60 * minutes
        self.last = step
        """The last step that was saved."""
        self.since = time.monotonic()
        self.asked = False

    def asks(self) -> bool:
        """Whether this process wants a save, by its clock; true once until the next save."""
        due = self.seconds > 0 and time.monotonic() - self.since >= self.seconds
        if self.asked or not due or not is_first():
            return False
        self.asked = True
        return True

    def is_due(self, step: int, wanted: bool) -> bool:
        """Whether to save this step; `wanted` is what the processes have agreed on."""
        kept = self.keep_every > 0 and step % self.keep_every == 0
        return wanted or kept or step % self.every == 0

    def saved(self, step: int) -> None:
        self.last, self.since, self.asked = step, time.monotonic(), False
