"""The pure parts of training: the model as a function, the first state, one step."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jax.typing import ArrayLike

from examples.config import RunConfig
from examples.loss import next_token_loss
from examples.models.gpt import GPT

Apply = Callable[[optax.Params, ArrayLike], jax.Array]
"""Parameters and tokens (B, T) to logits (B, T, V)."""


class TrainState(NamedTuple):
    """All that changes during training; a plain pytree of arrays."""

    params: optax.Params
    opt_state: optax.OptState


TrainStep = Callable[[TrainState, ArrayLike, ArrayLike], tuple[TrainState, jax.Array]]


def make_apply(config: RunConfig, vocab_size: int) -> Apply:
    """The model as a function of its parameters; makes no arrays."""
    model = nnx.eval_shape(lambda: GPT(config.model, vocab_size, nnx.Rngs(0)))
    graph, _ = nnx.split(model)
    return lambda params, tokens: nnx.merge(graph, params)(jnp.asarray(tokens))


def abstract_state(init: Callable[[], TrainState]) -> TrainState:
    """The shapes, types and places of the arrays of a state; makes none of them."""
    place = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(init)
    )


def first_state(init: Callable[[], TrainState]) -> TrainState:
    """The state before the first step, made where it stays."""
    places = jax.tree.map(lambda x: x.sharding, abstract_state(init))
    return jax.jit(init, out_shardings=places)()


def make_init(
    config: RunConfig, vocab_size: int, optimizer: optax.GradientTransformation
) -> Callable[[], TrainState]:
    """The state before the first step as a function of nothing but the configuration."""

    def init() -> TrainState:
        model = GPT(config.model, vocab_size, nnx.Rngs(config.seed))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return TrainState(params, optimizer.init(params))

    return init


def make_train_step(apply: Apply, optimizer: optax.GradientTransformation) -> TrainStep:
    """One optimizer step, compiled; it gives up the memory of the state it is given."""

    def train_step(
        state: TrainState, inputs: ArrayLike, targets: ArrayLike
    ) -> tuple[TrainState, jax.Array]:
        def loss_of(params: optax.Params) -> jax.Array:
            return next_token_loss(apply(params, inputs), targets)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    return jax.jit(train_step, donate_argnums=0)
