"""What the width changes: `python -m examples.widths check PRESET`, or `rates SWEEP ... --out DIR`.

`check` trains models of several widths for a few steps and compares activations and updates.
`rates` draws the best rate by width from finished sweeps that differ in `--model.d-model`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from examples.experiments.sweeps import coordinates, widths
from examples.trainer.system.errors import UserError
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.widths"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(command(argv)))


def command(argv: Sequence[str]) -> Path:
    """Runs the command that the first word names; returns the page that it has written."""
    name, *rest = argv if argv else [""]
    if name == "check":
        return widths.write_check(coordinates.run(coordinates.parse(rest)))
    if name == "rates":
        return tyro.cli(rates, args=rest, prog=f"{PROGRAM} rates")
    raise UserError(f"{PROGRAM} {name}: give check PRESET, or rates SWEEP ... --out DIR.")


def rates(folders: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path) -> Path:
    """Writes the best rate of each method by width.

    Args:
      folders: folders of sweeps that differ in width.
      out: where to write.
    """
    return widths.write_rates(folders, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
