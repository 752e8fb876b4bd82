"""A model as pure functions of its parameters; nothing here makes arrays when it is called."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike

from examples import models
from examples.models import Forward
from examples.settings.model import ModelConfig
from examples.training import sharding

Seed = int | jax.Array


def make_forward(config: ModelConfig, vocab_size: int, mesh: Mesh) -> Forward:
    """The model as a function of its parameters."""
    model = nnx.eval_shape(lambda: models.build(config, vocab_size, nnx.Rngs(0)))
    graph, _ = nnx.split(model)

    def forward(
        params: optax.Params, tokens: ArrayLike, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, sharding.gather_tables(params, mesh))
        return model.forward(jnp.asarray(tokens), kv_cache, start)

    return forward


def make_init_params(config: ModelConfig, vocab_size: int) -> Callable[[Seed], optax.Params]:
    """The initial parameters as a function of the seed."""
    return lambda seed: nnx.to_pure_dict(
        nnx.state(models.build(config, vocab_size, nnx.Rngs(jax.random.key(seed))), nnx.Param)
    )
