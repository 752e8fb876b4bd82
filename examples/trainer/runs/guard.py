"""A process that ends another one which is silent: `python guard.py SECONDS < PIPE`.

Its parent writes to the pipe as long as Python runs there, and closes it at the end. After so many
silent seconds the parent gets `SIGVTALRM`. A second in which one of the two is stopped, as by
Ctrl-Z, does not count.
"""

import os
import select
import signal
import sys
from pathlib import Path

LATE = """error: Python has stood still for {:.0f} s (--watchdog-minutes): a call of C may hang. \
Start all again with --resume. What every thread does:
"""


def main(parent: int, seconds: float) -> None:
    tick = min(1, seconds / 10)
    silent = 0.0
    while silent < seconds:
        if not select.select([0], [], [], tick)[0]:
            silent += 0 if is_stopped(parent) else tick
        elif os.read(0, 4096):
            silent = 0
        else:
            return
    if os.getppid() == parent:  # else it has ended, and another one may have its number
        os.write(2, LATE.format(seconds).encode())
        os.kill(parent, signal.SIGVTALRM)


def is_stopped(process: int) -> bool:
    """Whether a process is stopped; False where no /proc says so."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] in "tT"
    except OSError:
        return False


if __name__ == "__main__":
    main(os.getppid(), float(sys.argv[1]))
