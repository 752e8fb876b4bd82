"""Zero-shot tasks of a trained model: `python -m examples.tasks runs/NAME`."""

import sys
from collections.abc import Sequence

import tyro

from examples.trainer.inference.tasks import evaluate
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.tasks"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(evaluate, args=argv, prog=PROGRAM)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
