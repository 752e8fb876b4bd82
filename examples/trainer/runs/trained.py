"""The model of a run from its folder, and the text that it writes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.typing import ArrayLike
from tokenizers import Tokenizer

from examples.trainer.data import tokenizer
from examples.trainer.data.tokenizer import end_of, ids_of
from examples.trainer.models import sharding
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.checkpoint import Checkpoints
from examples.trainer.settings import validation
from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import Count, NotNegative
from examples.trainer.training.step import Forward, init_params, make_forward


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint of a run, and the mesh to load it on."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run."""
    step: int | None = None
    """Step of the checkpoint; the last one by default."""
    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4; empty: all of them on fsdp."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: NotNegative = 0.8
    """Below 1 sharpens the model's distribution; 0 always takes the likeliest token."""
    top_k: Count = 50
    """Number of likeliest tokens to draw from."""


DEFAULT = Sampling()


@dataclass(frozen=True)
class TrainedModel:
    """A model with its parameters."""

    config: RunConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    step: int
    params: optax.Params
    forward: Forward

    def text(self, prompt: str, tokens: int, key: jax.Array, sampling: Sampling = DEFAULT) -> str:
        """The start of a document, continued by so many tokens."""
        ids = [end_of(self.tokenizer)[1], *ids_of(self.tokenizer, [prompt])[0]]
        context = self.config.model.context
        new = sample_ids(self.forward, self.params, ids, tokens, context, key, sampling)
        return self.tokenizer.decode(ids[1:] + new)


def load(checkpoint: CheckpointRef) -> TrainedModel:
    """Reads the parameters of a checkpoint onto a mesh, and nothing else of it."""
    config, _ = run_folder.read_config(checkpoint.run)
    words = tokenizer.load(checkpoint.run / run_folder.TOKENIZER)
    metadata = run_folder.metadata_of(checkpoint.run, config)
    # The run may have asked for a kernel that this machine lacks.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="auto"))
    mesh = sharding.make_mesh(checkpoint.mesh, jax.devices())
    vocab_size = words.get_vocab_size()
    shapes = jax.eval_shape(lambda: init_params(config.model, vocab_size, 0))
    abstract = sharding.abstract(shapes, mesh)
    place = checkpoint.run / "checkpoints"
    with Checkpoints(place, metadata, read_only=True) as checkpoints:
        step = checkpoints.choose(checkpoint.step)
        params = checkpoints.restore(step, {"params": abstract})["params"]
    forward, _ = make_forward(config.model, vocab_size, mesh)
    return TrainedModel(config, words, mesh, step, params, forward)


def sample_ids(
    forward: Forward,
    params: optax.Params,
    ids: Sequence[int],
    n_new: int,
    context: int,
    key: jax.Array,
    sampling: Sampling,
) -> list[int]:
    """`n_new` ids that follow `ids`, each drawn after a pass over the last ones."""
    validation.check(sampling)
    draw, text = make_draw(forward, key.sharding, sampling), list(ids)
    for i in range(n_new):
        seen = text[-context:]
        window = np.zeros((1, context), np.int32)
        window[0, : len(seen)] = seen
        text.append(int(draw(params, window, len(seen), jax.random.fold_in(key, i))))
    return text[len(ids) :]


@functools.lru_cache(maxsize=2)  # several texts are often sampled from one model
def make_draw(forward: Forward, replicated: Any, sampling: Sampling) -> Callable[..., jax.Array]:
    """A compiled function to the token after `length` ones of a window (1, T), in each process."""

    @functools.partial(jax.jit, out_shardings=replicated)
    def draw(
        params: optax.Params, window: ArrayLike, length: ArrayLike, key: jax.Array
    ) -> jax.Array:
        # No earlier token sees the padding after `length`.
        logits = forward(params, window)[0, jnp.asarray(length) - 1]
        best, tokens = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[0]))
        if sampling.temperature == 0:
            return tokens[0]
        return tokens[jax.random.categorical(key, best / sampling.temperature)]

    return draw
