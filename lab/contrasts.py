"""Differences between methods of sweeps, with intervals: `python -m lab.contrasts FILE`."""

import re
import sys
from pathlib import Path
from typing import Annotated

import tyro

from examples.trainer.system.errors import command
from lab.sweeps import contrasts

EXPERIMENTS = Path("lab/results/experiments")


def write(
    file: Annotated[Path, tyro.conf.Positional] = EXPERIMENTS / "pooled/contrasts.json",
    sweeps: Path = EXPERIMENTS,
    pooled: bool = False,
    only: str = "",
) -> str:
    """Writes a table of differences of losses, each method at its best rate, paired by seed.

    Args:
      file: a JSON list of contrasts, see `lab/sweeps/contrasts.py`; by default
        those of the table of evidence.
      sweeps: the folder of the sweeps that it names.
      pooled: write the mean over all lines too, as random effects (Paule and Mandel, Hartung and
        Knapp): for lines that ask one question in cells that share no seed.
      only: the lines whose names match this regular expression.
    """
    asked = [each for each in contrasts.read(file) if re.search(only, each.name)]
    lines = [contrasts.table(asked, sweeps)]
    return "\n\n".join([*lines, contrasts.pooled_line(asked, sweeps)] if pooled else lines)


main = command(write, "lab.contrasts")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
