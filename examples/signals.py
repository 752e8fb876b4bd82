"""Ctrl-C and SIGTERM as requests to stop after the step."""

import signal
from collections.abc import Callable
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Holds back the first Ctrl-C and every SIGTERM; the second Ctrl-C is as usual."""

    def __init__(self, agree: Callable[[int], int]):
        """`agree` makes of this process's request the one that all processes follow."""
        self.agree = agree
        self.asked = 0
        self.agreed = 0
        """The number of the signal that the run stops for; 0: it goes on."""

    def __enter__(self) -> "StopRequests":
        self.before = {int(number): signal.signal(number, self.ask) for number in STOPPING}
        return self

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        self.asked = self.asked or number
        if number == signal.SIGINT:
            signal.signal(number, self.before[number])

    def stop(self) -> bool:
        """Whether to stop now; asked once before each step."""
        self.agreed = self.agree(self.asked)
        return self.agreed > 0

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def exit_status(number: int) -> int:
    """What a shell reports for a program that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number
