"""The exit status of a command."""

import sys
from collections.abc import Callable

from examples.system.errors import UserError


def run_command(work: Callable[[], int | None]) -> int:
    """Runs `work` and returns its exit status: 0 if it has none, 2 after a `UserError`."""
    try:
        return work() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def of_signal(number: int) -> int:
    """What a shell reports for a program ended by a signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number
