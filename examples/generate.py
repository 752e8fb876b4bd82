"""Text from a trained model: `python -m examples.generate runs/NAME --prompt "def "`."""

import sys
from collections.abc import Sequence

import tyro

from examples.trainer.inference.generate import generate
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.generate"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(generate, args=argv, prog=PROGRAM)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
