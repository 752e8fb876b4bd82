"""What ends a run before its last step: Ctrl-C and SIGTERM."""

import signal
from types import FrameType

from examples.trainer.runs.processes import Agree

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

    def stop(self, slow: bool = False) -> bool:
        """Whether to stop now; called once before each step.

        `slow`: this process finds that steps are slow. Where all wait for slow steps, a request is
        known before the next step; otherwise two steps run before the run stops, and with several
        processes three.
        """
        self.agreed, waits = self.agree((self.asked, slow), self.waits)
        self.waits = bool(waits)
        return self.agreed > 0

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
