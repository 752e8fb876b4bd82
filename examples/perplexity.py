"""Loss of a trained model on any text: `python -m examples.perplexity runs/NAME --texts FILE`."""

import sys
from collections.abc import Sequence

import tyro

from examples.trainer.inference.perplexity import perplexity
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.perplexity"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(perplexity, args=argv, prog=PROGRAM)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
