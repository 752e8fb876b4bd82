"""The exit status of a command."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from examples.trainer.system import files
from examples.trainer.system.errors import UserError


def run_command(work: Callable[[], int | None], label: Callable[[], str] = str) -> int:
    """Runs `work` and returns its exit status: 0 if it has none, 2 after a `UserError`.

    `label` names the process in a message. Where nobody reads the output any more, as behind
    `| head`, the command ends like others there: at once, and without a word.
    """
    try:
        try:
            with files.explained("a file"):
                return work() or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # Python would flush again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return of_signal(signal.SIGPIPE)
    except UserError as error:
        print(f"error{label()}: {error}", file=sys.stderr)
        return 2


def command(work: Callable[..., object], name: str) -> Callable[[Sequence[str]], int]:
    """The `main` of a command that prints what `work` returns, whose signature has the flags."""

    def main(argv: Sequence[str]) -> int:
        import tyro  # slow, and `examples.train` imports this module before it can say a word

        return run_command(lambda: print(tyro.cli(work, args=argv, prog=f"python -m {name}")))

    return main


def of_signal(number: int) -> int:
    """What a shell reports for a program ended by a signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number


def leave(status: int) -> NoReturn:
    """Ends the process. After an error or a stop it does so at once, whatever threads still do.

    Python would wait for threads first, among them those of a save that nobody waits for any more
    and that may never end. What they write is in temporary folders until it is complete.
    """
    if status == 0:
        sys.exit()
    leave_at_once(status)


def leave_at_once(status: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
