"""Errors whose message is written for the person at the terminal, and how commands end."""

import contextlib
import errno
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn


class UserError(Exception):
    """Something the user can correct; printed without a traceback."""


class Diverged(UserError):
    """Too many steps in a row had a loss or gradient that is not finite."""

    def __init__(self, step: int, skipped: int, saved: int):
        self.step = step
        steps = f"at {skipped} steps in a row" if skipped > 1 else "at a step"
        kept = f"the last checkpoint is of step {saved}" if saved else "there is no checkpoint yet"
        super().__init__(
            f"the loss or its gradient was not finite {steps}, the last of them step {step}. None "
            f"of them changed the parameters; {kept}. Start again with a lower "
            "--optimizer.learning-rate or --optimizer.adam-learning-rate."
        )


def load_package(module: str, use: str, file: str) -> ModuleType:
    """Imports a module that `use` needs; if it is missing, says what installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{use} needs the package {module.split('.')[0]} ({error}): "
            f"pip install -r requirements/{file}.txt."
        ) from None


def run_command(work: Callable[[], int | None]) -> int:
    """The exit status of `work`: 0 if it returns none, 2 after an error that can be corrected."""
    try:
        return work() or 0
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except Exception as error:
        if not (sentence := of_the_machine(error)):
            raise
        print(f"error: {sentence}", file=sys.stderr)
    return 2


def of_the_machine(error: Exception) -> str:
    """A sentence for an error of memory or disk, which XLA and Orbax raise as their own kinds."""
    words = str(error) or type(error).__name__
    line = words.strip().splitlines()[0][:200]
    if os.strerror(errno.ENOSPC) in words or os.strerror(errno.EDQUOT) in words:
        return f"the disk is full ({line}): make room, and resume from the last checkpoint."
    if isinstance(error, MemoryError) or re.search("RESOURCE_EXHAUSTED|Out of memory", words):
        return (
            f"there is too little memory ({line}): give a smaller --batch-size or --model.context, "
            "a larger --accumulate, or --model.remat full with --model.scan."
        )
    return ""


def command(work: Callable[..., object], name: str) -> Callable[[Sequence[str]], int]:
    """The `main` of a command that prints what `work` returns, whose signature has the flags."""

    def main(argv: Sequence[str]) -> int:
        import tyro  # slow, and `examples.train` imports this module before it can say a word

        return run_command(lambda: print(tyro.cli(work, args=argv, prog=f"python -m {name}")))

    return main


def leave(status: int) -> NoReturn:
    """Ends the process. After an error or a stop it does so at once, whatever threads still do.

    Python would wait for threads first, among them those of a save that nobody waits for any more
    and that may never end. What they write is in temporary folders until it is complete.
    """
    if status:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit()
