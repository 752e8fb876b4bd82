"""Makes a text ready without training: `python -m examples.data --help`.

For FineWeb, before many processes need it or where only one machine has a network; with --verify,
to check a text that was copied.
"""

import sys
from collections.abc import Sequence

import tyro

from examples import config as configs
from examples.config import DataConfig, RunConfig
from examples.data.prepare import prepare
from examples.errors import UserError

PROGRAM = "python -m examples.data"
DESCRIPTION = (
    "Makes a text ready, as a run with the same flags (there --data.source, ...) will find it."
)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    config = tyro.cli(DataConfig, args=argv, prog=PROGRAM, description=DESCRIPTION)
    try:
        configs.check(RunConfig(data=config))
        dataset = prepare(config, print)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; FineWeb goes on from its last whole shard.")
        return 130
    print(
        f"{dataset.train.meta.tokens:,} training and {dataset.val.meta.tokens:,} validation "
        f"tokens, {dataset.tokenizer.get_vocab_size()} in the vocabulary"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
