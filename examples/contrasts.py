"""Differences between methods of sweeps, with intervals: `python -m examples.contrasts FILE`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from examples.experiments.sweeps import contrasts
from examples.trainer.system.exit_status import command


def write(
    file: Annotated[Path, tyro.conf.Positional], sweeps: Path = Path("results/experiments")
) -> str:
    """Writes a table of differences of losses, each method at its best rate, paired by seed.

    Args:
      file: a JSON list of contrasts, see `examples/experiments/sweeps/contrasts.py`.
      sweeps: the folder of the sweeps that it names.
    """
    return contrasts.table(contrasts.read(file), sweeps)


main = command(write, "examples.contrasts")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
