"""Tables of sweeps, each method at its best rate: `python -m examples.report FOLDER ...`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from examples.experiments.sweeps import results
from examples.experiments.sweeps.report import table
from examples.trainer.system.exit_status import command


def report(folders: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> str:
    """Writes a table of each sweep.

    Args:
      folders: folders of sweeps.
    """
    return "\n\n".join(table(results.read(folder)) for folder in folders)


main = command(report, "examples.report")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
