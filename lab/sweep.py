"""Many runs of one model that differ in their optimizer: `python -m lab.sweep PRESET`."""

import sys
from collections.abc import Sequence

from examples.trainer.system.errors import leave, run_command
from lab.sweeps import command_line
from lab.sweeps.run import sweep


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        return run_command(lambda: sweep(*command_line.parse(argv)))
    except KeyboardInterrupt:
        print("\nstopped; the same command continues.")
        return 130


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
