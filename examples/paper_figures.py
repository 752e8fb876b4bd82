"""The paper's figures of imbalance: `python -m examples.paper_figures SWEEP --out DIR`.

SWEEP is the folder of a sweep with `--optimizer.record-every`; examples/README.md has its command.
"""

import sys
from collections.abc import Sequence

import tyro

from examples.experiments.paper.figures import draw
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.paper_figures"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(draw, args=argv, prog=PROGRAM)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
