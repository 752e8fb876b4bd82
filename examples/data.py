"""Prepares a text without training: `python -m examples.data --help`.

This is for FineWeb before many processes need it, or where only one machine has a network.
`python -m examples.data prepare --help` tokenizes many files.
"""

import sys
from collections.abc import Sequence

import tyro

from examples.trainer.data.prepare import Preparation, prepare, prepare_parts
from examples.trainer.settings import validation
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.data"
DESCRIPTION = "Prepares a text for runs with the same flags (there --data.source, ...)."


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    work = prepare_many if list(argv[:1]) == ["prepare"] else prepare_one
    try:
        return run_command(lambda: work(argv))
    except KeyboardInterrupt:
        print("\nstopped; the same command continues after what is complete.")
        return 130


def prepare_many(argv: Sequence[str]) -> None:
    """Tokenizes files, after their settings were checked."""
    asked = tyro.cli(Preparation, args=argv[1:], prog=f"{PROGRAM} prepare")
    validation.check(asked)
    prepare_parts(asked, print)


def prepare_one(argv: Sequence[str]) -> None:
    """Prepares a text and prints its size."""
    config = tyro.cli(DataConfig, args=argv, prog=PROGRAM, description=DESCRIPTION)
    validation.check(RunConfig(data=config))
    dataset = prepare(config, print)
    print(
        f"{dataset.train.meta.tokens:,} training and {dataset.val.meta.tokens:,} validation "
        f"tokens, {dataset.tokenizer.get_vocab_size()} in the vocabulary"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
