"""Ends a process in which nothing happens any more, after the stacks of all its threads."""

import faulthandler
import os
import statistics
import threading
import time
from collections import defaultdict, deque

from examples.trainer.runs.processes import process_label

START, STEP, EVALUATION, SAVE = "start", "step", "evaluation", "save"
MEDIANS, FIRST = 10, 6  # how many times its median, and at first the least time, a phase may take
SILENT = 60  # seconds more until a Python that stands still is ended
LATE = """error{}: a {} has not ended after {:.0f} s, and may take {:.0f} s (--watchdog-minutes): \
a disk, a network or a process may hang. Start all again with --resume. What every thread does:
"""


class Watchdog:
    """Watches a loop that says when a phase begins: a step, an evaluation, a save.

    A phase may take 10 times the median of those before it, and at least `minutes`; the first may
    take 6 times `minutes`. Where Python itself stands still, a C thread ends the process.
    """

    def __init__(self, minutes: float):
        self.least = 60 * minutes
        self.durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=50))
        self.stopping = threading.Event()
        self.phase, self.since = START, time.monotonic()

    def __enter__(self) -> "Watchdog":
        if self.least:
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopping.set()
        faulthandler.cancel_dump_traceback_later()

    def began(self, phase: str) -> None:
        """The phase before this one has ended."""
        now = time.monotonic()
        self.durations[self.phase].append(now - self.since)
        self.phase, self.since = phase, now

    def limit(self) -> float:
        past = self.durations[self.phase]
        return max(self.least, MEDIANS * statistics.median(past)) if past else FIRST * self.least

    def watch(self) -> None:
        while not self.stopping.wait(min(1, self.least / 10)):
            faulthandler.dump_traceback_later(self.least + SILENT, exit=True, file=2)
            waited, limit = time.monotonic() - self.since, self.limit()
            if waited > limit:
                os.write(2, LATE.format(process_label(), self.phase, waited, limit).encode())
                faulthandler.dump_traceback(file=2)
                os._exit(1)  # without waiting for what hangs
