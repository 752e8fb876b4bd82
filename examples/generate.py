"""Text from a trained model: `python -m examples.generate runs/NAME --prompt "def "`."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.models.sampling import DEFAULT, Sampling
from examples.trainer.runs.summary import sample_text
from examples.trainer.system.errors import UserError
from examples.trainer.system.exit_status import run_command

PROGRAM = "python -m examples.generate"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(generate, args=argv, prog=PROGRAM)))


def generate(
    checkpoint: Annotated[CheckpointRef, tyro.conf.arg(name="")],
    prompt: str = "",
    tokens: int = 200,
    seed: int = 0,
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = DEFAULT,
) -> str:
    """Continues a text.

    Args:
      checkpoint: the model.
      prompt: start of the text; empty: the start of a document.
      tokens: number of tokens to add.
      seed: seed of the random draws.
      sampling: how tokens are drawn.
    """
    if tokens < 1:
        raise UserError(f"--tokens is {tokens}: give at least 1.")
    model = trained.load(checkpoint)
    key, network = model.key(seed), model.config.model
    return sample_text(
        model.forward, model.params, model.tokenizer, prompt, tokens, network, key, sampling
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
