"""A command in a process of its own, such as a compiler: one that dies costs one program."""

import collections
import contextlib
import json
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import IO, Any


@contextlib.contextmanager
def process(
    command: Sequence[str], variables: Mapping[str, str], limit_s: float
) -> Generator[tuple[Iterator[dict[str, Any]], Callable[[], str]]]:
    """Runs a command, and kills it after ``limit_s`` seconds or at the end of the context.

    Yields:
      The lines of JSON that it prints, as they come, and a function that waits for its end and
      returns how it ended: empty if all is well.
    """
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        running = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        stack.enter_context(running)
        stack.callback(running.kill)  # before its context waits for it
        late = threading.Event()

        def stop() -> None:
            late.set()
            running.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        stack.callback(timer.cancel)
        assert running.stdout is not None
        lines = (json.loads(line) for line in running.stdout if line.startswith("{"))
        yield lines, lambda: how_it_ended(running, errors, limit_s if late.is_set() else None)


def how_it_ended(running: subprocess.Popen[str], errors: IO[str], limit_s: float | None) -> str:
    """Empty if all is well, else the exit status or signal and the last line of errors."""
    code = running.wait()
    if limit_s is not None:
        return f"not done after {limit_s:.0f} s"
    if code == 0:
        return ""
    errors.seek(0)
    (last,) = collections.deque((x.strip() for x in errors if x.strip()), maxlen=1) or ("",)
    ended = f"exit status {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    return f"{ended}: {last[:300] or 'no message'}"
