"""The model of a run, from its folder alone."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.typing import ArrayLike
from tokenizers import Tokenizer

from examples import runs, sharding, training
from examples.checkpoint import restore_params
from examples.config import RunConfig
from examples.training import Extend


@dataclass(frozen=True)
class Place:
    """Which model, and where it is computed."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run."""
    step: int | None = None
    """That of a checkpoint; the last one by default."""
    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4; empty: all of them on fsdp."""


@dataclass(frozen=True)
class Trained:
    """A model with its parameters."""

    config: RunConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    step: int
    params: optax.Params
    extend: Extend

    @functools.cached_property
    def token_losses(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Parameters, inputs and targets to nats, and whether no other token was likelier."""

        def losses(
            params: optax.Params, inputs: ArrayLike, targets: ArrayLike
        ) -> tuple[jax.Array, jax.Array]:
            logits, _ = self.extend(params, inputs, None, 0)
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return nats, jnp.argmax(logits, axis=-1) == targets

        everywhere = sharding.replicated(self.mesh)
        return jax.jit(losses, out_shardings=everywhere)


def load(place: Place) -> Trained:
    """Reads the parameters of a checkpoint, and nothing else of it, onto a mesh."""
    config, _ = runs.reopen(place.run)
    tokenizer = runs.read_tokenizer(place.run)
    mesh = sharding.make_mesh(place.mesh, jax.devices())
    vocab_size = tokenizer.get_vocab_size()
    init = training.make_init_params(config.model, vocab_size)
    shapes = jax.eval_shape(init, 0)
    abstract = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        sharding.of_params(shapes, mesh),
    )
    step, params = restore_params(place.run / "checkpoints", place.step, abstract)
    extend = training.make_extend(config.model, vocab_size, mesh)
    return Trained(config, tokenizer, mesh, step, params, extend)
