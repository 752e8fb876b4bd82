"""What ends a run before its last step: Ctrl-C, SIGTERM, and a watchdog where nothing happens."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from types import FrameType

from examples.trainer.runs import guard
from examples.trainer.runs.processes import Agree, process_label

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Turns the first Ctrl-C and every SIGTERM into a request; a second Ctrl-C interrupts.

    A third one, before the program has ended, ends the process without Python: Python acts on
    signals between its own instructions only, and a step or a disk may take long.
    """

    def __init__(self, agree: Agree):
        """`agree` turns this process's requests into those that all processes follow."""
        self.agree = agree
        self.asked = 0
        self.agreed = 0
        """The signal that all processes stop for; 0 as long as they continue."""
        self.save = False
        """Whether all processes save after the next step."""
        self.evaluate = False
        """Whether all processes evaluate after the next step."""
        self.waits = False
        """Whether a step is waited for before the next one is given to the devices."""

    def __enter__(self) -> "StopRequests":
        self.before = {int(number): signal.signal(number, self.handle) for number in STOPPING}
        return self

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number
        if number == signal.SIGINT:
            signal.signal(number, self.interrupt)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ends what the main thread does; a third Ctrl-C kills the process."""
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    def stop(self, save: bool = False, slow: bool = False, evaluate: bool = False) -> bool:
        """Whether to stop now; called once before each step.

        This process wants a save or an evaluation, or finds that steps are slow. Where all wait for
        slow steps, a request is known before the next step; otherwise two steps run before the run
        stops, and with several processes three.
        """
        own = (self.asked, save, slow, evaluate)
        self.agreed, *wanted = self.agree(own, self.waits)
        self.save, self.waits, self.evaluate = map(bool, wanted)
        return self.agreed > 0

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


START, STEP, EVALUATION, SAVE = "start", "step", "evaluation", "save"
MEDIANS, FIRST = 10, 6  # how many times its median, and at first the least time, a phase may take
SILENT = 60  # seconds more until a Python that stands still is ended
LATE = """error{}: a {} has not ended after {:.0f} s, and may take {:.0f} s (--watchdog-minutes): \
a disk, a network or a process may hang. Start all again with --resume. What every thread does:
"""


class Watchdog:
    """Watches a loop that says when a phase begins: a step, an evaluation, a save.

    A phase may take 10 times the median of those before it, and at least `minutes`; the first may
    take 6 times `minutes`. Where Python itself stands still, another process ends this one. Both
    count their own ticks, which a process that is paused does not have.
    """

    def __init__(self, minutes: float):
        self.least = 60 * minutes
        self.durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=50))
        self.stopping = threading.Event()
        self.phase, self.since, self.waited = START, time.monotonic(), 0.0

    def __enter__(self) -> "Watchdog":
        if self.least:
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopping.set()

    def began(self, phase: str) -> None:
        """The phase before this one has ended."""
        now = time.monotonic()
        self.durations[self.phase].append(now - self.since)
        self.phase, self.since, self.waited = phase, now, 0.0

    def limit(self) -> float:
        past = self.durations[self.phase]
        return max(self.least, MEDIANS * statistics.median(past)) if past else FIRST * self.least

    def watch(self) -> None:
        # The other process sends a signal, at which C prints the stacks and ends this one. Without
        # `_exit` it would not end the first process of a container.
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGVTALRM, ctypes.cast(libc._exit, ctypes.c_void_p))
        faulthandler.register(signal.SIGVTALRM, file=2, chain=True)
        command = [sys.executable, "-IS", guard.__file__, str(self.least + SILENT)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, bufsize=0, start_new_session=True) as other:
            assert other.stdin is not None
            while not self.stopping.wait(tick := min(1, self.least / 10)):
                with contextlib.suppress(BrokenPipeError):  # the other process was killed
                    other.stdin.write(b".")
                self.waited += tick
                if self.waited > (limit := self.limit()):
                    late = LATE.format(process_label(), self.phase, self.waited, limit)
                    os.write(2, late.encode())
                    faulthandler.dump_traceback(file=2)
                    os._exit(1)  # without waiting for what hangs
