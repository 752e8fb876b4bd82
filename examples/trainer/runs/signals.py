"""Ctrl-C and SIGTERM as requests to stop after the current step."""

import signal
from collections.abc import Callable
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Turns the first Ctrl-C and every SIGTERM into a request; a second Ctrl-C interrupts.

    A third one, before the program has ended, ends the process without Python: Python acts on
    signals between its own instructions only, and a step or a disk may take long.
    """

    def __init__(self, agree: Callable[[int], int]):
        """`agree` turns this process's request into the one that all processes follow."""
        self.agree = agree
        self.asked = 0
        self.agreed = 0
        """The signal that all processes stop for; 0 as long as they continue."""

    def __enter__(self) -> "StopRequests":
        self.before = {int(number): signal.signal(number, self.handle) for number in STOPPING}
        return self

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number
        if number == signal.SIGINT:
            signal.signal(number, self.interrupt)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ends what the main thread does; a further Ctrl-C is the kernel's matter."""
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    def stop(self) -> bool:
        """Whether to stop now; called once before each step."""
        self.agreed = self.agree(self.asked)
        return self.agreed > 0

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
