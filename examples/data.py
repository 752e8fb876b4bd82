"""Turns a text into tokens before a run: `python -m examples.data --source fineweb`."""

import sys
from typing import Annotated

import tyro

from examples.trainer.data.prepare import prepare
from examples.trainer.settings import validation
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import command


def tokens(data: Annotated[DataConfig, tyro.conf.arg(name="")]) -> str:
    """Turns a text into tokens, which runs with the same flags find (there --data.source, ...)."""
    validation.check(RunConfig(data=data))
    found = prepare(data, print)
    return (
        f"{len(found.train.ids):,} training and {len(found.val.ids):,} validation tokens, "
        f"{found.tokenizer.get_vocab_size()} in the vocabulary"
    )


main = command(tokens, "examples.data")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
