"""Differences between methods of sweeps, with intervals: `python -m examples.contrasts FILE`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from examples.experiments.sweeps import contrasts
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.contrasts"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(write, args=argv, prog=PROGRAM)))


def write(
    file: Annotated[Path, tyro.conf.Positional], sweeps: Path = Path("results/experiments")
) -> str:
    """Writes a table of differences of losses, each method at its best rate, paired by seed.

    Args:
      file: a JSON list of contrasts, see `examples/experiments/sweeps/contrasts.py`.
      sweeps: the folder of the sweeps that it names.
    """
    return contrasts.table(contrasts.read(file), sweeps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
