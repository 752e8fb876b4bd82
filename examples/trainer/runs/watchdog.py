"""Ends a process in which nothing happens any more, after the stacks of all its threads."""

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque

from examples.trainer.runs.processes import process_label

START, STEP, EVALUATION, SAVE = "start", "step", "evaluation", "save"
MEDIANS = 10  # how many times its median a phase may take
FIRST = 6  # how many times the least time a phase may take at first, when it may compile
SILENT = 60  # seconds more until a Python that stands still is ended
KEPT = 50  # durations of a phase, for its median


class Watchdog:
    """Watches a loop that says when a phase begins: a step, an evaluation, a save.

    A phase may take 10 times the median of those before it, and at least `minutes`; the first one
    of its kind may take 6 times `minutes`. A thread of Python looks at the time. If Python itself
    stands still, so that this thread does not run, the C thread of faulthandler ends the process.
    """

    def __init__(self, minutes: float):
        self.least = 60 * minutes
        self.durations: dict[str, deque[float]] = {}
        self.phase = START
        self.since = time.monotonic()
        self.stopping = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self.least:
            self.since = time.monotonic()
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopping.set()
        faulthandler.cancel_dump_traceback_later()

    def began(self, phase: str) -> None:
        """The phase before this one has ended."""
        now = time.monotonic()
        self.durations.setdefault(self.phase, deque(maxlen=KEPT)).append(now - self.since)
        self.phase, self.since = phase, now

    def limit(self) -> float:
        """Seconds that the current phase may take."""
        past = self.durations.get(self.phase)
        return max(self.least, MEDIANS * statistics.median(past)) if past else FIRST * self.least

    def watch(self) -> None:
        while not self.stopping.wait(min(1, self.least / 10)):
            faulthandler.dump_traceback_later(self.least + SILENT, exit=True, file=2)
            waited, limit = time.monotonic() - self.since, self.limit()
            if waited > limit:
                self.end(waited, limit)

    def end(self, waited: float, limit: float) -> None:
        print(
            f"error{process_label()}: a {self.phase} has not ended after {waited:.0f} s, and may "
            f"take {limit:.0f} s (--watchdog-minutes). A disk, a network or another process may "
            "hang; below is what every thread does. Start all processes again with --resume.",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=2)
        os._exit(1)  # without waiting for what hangs
