"""Prepares a text without training: `python -m examples.data --help`.

This is for FineWeb before many processes need it, or where only one machine has a network; and with
--verify, to check a text that was copied.
"""

import sys
from collections.abc import Sequence

import tyro

from examples.trainer.data.prepare import prepare
from examples.trainer.settings import run
from examples.trainer.settings.run import DataConfig, RunConfig
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.data"
DESCRIPTION = "Prepares a text for runs with the same flags (there --data.source, ...)."


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    config = tyro.cli(DataConfig, args=argv, prog=PROGRAM, description=DESCRIPTION)
    try:
        return run_command(lambda: prepare_and_report(config))
    except KeyboardInterrupt:
        print("\nstopped; FineWeb continues from its last complete shard.")
        return 130


def prepare_and_report(config: DataConfig) -> None:
    """Prepares a text and prints its size."""
    run.check(RunConfig(data=config))
    dataset = prepare(config, print)
    print(
        f"{dataset.train.meta.tokens:,} training and {dataset.val.meta.tokens:,} validation "
        f"tokens, {dataset.tokenizer.get_vocab_size()} in the vocabulary"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
