"""Text from a trained model."""

from typing import Annotated

import jax
import tyro

from examples.trainer.data.tokenizer import end_id
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.models.sampling import DEFAULT, Sampling, sample_ids
from examples.trainer.system.errors import UserError


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
    ids = [end_id(model.tokenizer), *model.tokenizer.encode(prompt).ids]
    new = sample_ids(
        model.forward, model.params, ids, tokens, model.config.model, jax.random.key(seed), sampling
    )
    return model.tokenizer.decode(ids[1:] + new, skip_special_tokens=False)
