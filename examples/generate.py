"""Text from a trained model: `python -m examples.generate runs/NAME --prompt "def "`."""

import sys
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro

from examples.trainer.models import sharding
from examples.trainer.runs import trained
from examples.trainer.runs.trained import DEFAULT, CheckpointRef, Sampling
from examples.trainer.settings import validation
from examples.trainer.settings.validation import Count, CountOrZero
from examples.trainer.system.errors import command


@dataclass(frozen=True)
class Text:
    """What is written."""

    prompt: str = ""
    """Start of the text; empty: the start of a document."""
    tokens: Count = 200
    """Number of tokens to add."""
    seed: CountOrZero = 0
    """Seed of the random draws."""


def generate(
    checkpoint: Annotated[CheckpointRef, tyro.conf.arg(name="")],
    text: Annotated[Text, tyro.conf.arg(name="")] = Text(),
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = DEFAULT,
) -> str:
    """Continues a text.

    Args:
      checkpoint: the model.
      text: what is written.
      sampling: how tokens are drawn.
    """
    validation.check(text)
    model = trained.load(checkpoint)
    key = jax.device_put(jax.random.key(text.seed), sharding.replicated(model.mesh))
    return model.text(text.prompt, text.tokens, key, sampling)


main = command(generate, "examples.generate")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
