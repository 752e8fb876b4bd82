"""Tables and figures of one sweep or several: `python -m examples.report FOLDER ... --out DIR`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from examples.experiments.sweeps.report import write_report
from examples.trainer.system.exit_status import command


def report(folders: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path) -> Path:
    """Writes tables and figures of sweeps into a folder.

    Args:
      folders: folders of sweeps, each shown as a separate model in the tables.
      out: where to write.
    """
    return write_report(folders, out)


main = command(report, "examples.report")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
