"""Tables and figures of one sweep or several: `python -m examples.report FOLDER ... --out DIR`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from examples.experiments.sweeps.report import write_report
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.report"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(report, args=argv, prog=PROGRAM)))


def report(folders: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path) -> Path:
    """Writes tables and figures of sweeps into a folder.

    Args:
      folders: folders of sweeps, each shown as a separate model in the tables.
      out: where to write.
    """
    return write_report(folders, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
