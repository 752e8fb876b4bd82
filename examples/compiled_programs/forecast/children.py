"""Compilers in processes of their own: one that dies costs one program."""

import collections
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import IO, Any

from examples.compiled_programs.targets import Target, environment
from examples.trainer.system.errors import UserError

PROGRAM = "examples.compiled_programs.forecast"
LIMIT_S = 3600.0


def figures(
    words: Sequence[str],
    names: Sequence[str],
    target: Target,
    say: Callable[[str], None],
    limit_s: float = LIMIT_S,
) -> dict[str, dict[str, Any]]:
    """The figures of each program of a command line; `{"failed": how}` where its compiler died.

    Raises:
      UserError: if the run cannot be, on any machine of this kind.
    """
    found: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in found]:
        command = [sys.executable, "-m", PROGRAM, ",".join(left), *words]
        begun = left[0]
        with process(command, environment(target), limit_s) as (lines, ended):
            for line in lines:
                if "error" in line:
                    raise UserError(line["error"])
                if "begin" in line:
                    begun = line["begin"]
                    say(begun)
                else:
                    found[line["program"]] = line["figures"]
            how = ended()
        if how or begun not in found:  # else this loop would not end
            found[begun] = {"failed": how or "it ended without figures"}
    return found


@contextlib.contextmanager
def process(
    command: Sequence[str], variables: Mapping[str, str], limit_s: float
) -> Generator[tuple[Iterator[dict[str, Any]], Callable[[], str]]]:
    """A process, as the lines of JSON that it prints, and a function that says how it ended."""
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        child = stack.enter_context(
            subprocess.Popen(
                command,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        )
        stack.callback(child.kill)  # before its context waits for it
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        stack.callback(timer.cancel)
        assert child.stdout is not None
        lines = (json.loads(line) for line in child.stdout if line.startswith("{"))
        yield lines, lambda: how_it_ended(child, errors, limit_s if late.is_set() else None)


def how_it_ended(child: subprocess.Popen[str], errors: IO[str], limit_s: float | None) -> str:
    """Empty if all is well, else the exit status or signal and the last line of errors."""
    code = child.wait()
    if limit_s is not None:
        return f"not done after {limit_s:.0f} s"
    if code == 0:
        return ""
    errors.seek(0)
    (last,) = collections.deque((x.strip() for x in errors if x.strip()), maxlen=1) or ("",)
    ended = f"exit status {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    return f"{ended}: {last[:300] or 'no message'}"
