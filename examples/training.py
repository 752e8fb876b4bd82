"""The pure parts of training: the model as a function, the first state, one step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from examples import models, sharding
from examples.config import RunConfig
from examples.loss import next_token_loss

Apply = Callable[[optax.Params, ArrayLike], jax.Array]
"""Parameters and tokens (B, T) to logits (B, T, V)."""


class TrainState(NamedTuple):
    """All that changes during training, and the random key; a plain pytree of arrays."""

    params: optax.Params
    opt_state: optax.OptState
    key: jax.Array
    """The run's own, from its seed; what needs a random number folds a counter into it."""


TrainStep = Callable[[TrainState, ArrayLike, ArrayLike], tuple[TrainState, jax.Array]]


def make_apply(config: RunConfig, vocab_size: int, mesh: Mesh) -> Apply:
    """The model as a function of its parameters; makes no arrays."""
    model = nnx.eval_shape(lambda: models.build(config.model, vocab_size, nnx.Rngs(0)))
    graph, _ = nnx.split(model)

    def apply(params: optax.Params, tokens: ArrayLike) -> jax.Array:
        return nnx.merge(graph, sharding.gather_tables(params, mesh))(jnp.asarray(tokens))

    return apply


def make_init_params(config: RunConfig, vocab_size: int) -> Callable[[], optax.Params]:
    """The first parameters as a function of nothing but the configuration."""
    return lambda: nnx.to_pure_dict(
        nnx.state(models.build(config.model, vocab_size, nnx.Rngs(config.seed)), nnx.Param)
    )


def make_init(
    config: RunConfig,
    init_params: Callable[[], optax.Params],
    optimizer: optax.GradientTransformation,
) -> Callable[[], TrainState]:
    """The state before the first step as a function of nothing but the configuration."""

    def init() -> TrainState:
        params = init_params()
        return TrainState(params, optimizer.init(params), jax.random.key(config.seed))

    return init


def abstract_state(init: Callable[[], TrainState], mesh: Mesh) -> TrainState:
    """The shapes, types and places of the arrays of a state; makes none of them."""
    shapes = jax.eval_shape(init)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        sharding.of_state(shapes, mesh),
    )


def places(abstract: Any) -> Any:
    """The sharding of each array."""
    return jax.tree.map(lambda x: x.sharding, abstract)


def place_init(init: Callable[[], TrainState], abstract: TrainState) -> Callable[[], TrainState]:
    """`init`, compiled: each device makes what it keeps, and no more."""
    return jax.jit(init, out_shardings=places(abstract))


def make_train_step(
    apply: Apply,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    mesh: Mesh,
    accumulate: int,
) -> TrainStep:
    """One optimizer step, compiled; it gives up the memory of the state it is given."""

    def loss_of(params: optax.Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return next_token_loss(apply(params, inputs), targets)

    def train_step(
        state: TrainState, inputs: ArrayLike, targets: ArrayLike
    ) -> tuple[TrainState, jax.Array]:
        rows = (jnp.asarray(inputs), jnp.asarray(targets))
        pieces = jax.tree.map(lambda x: cut_rows(x, accumulate, mesh), rows)
        loss, grads = mean_over_pieces(jax.value_and_grad(loss_of), state.params, pieces)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.key), loss

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(places(abstract), sharding.replicated(mesh)),
    )


def cut_rows(x: jax.Array, n: int, mesh: Mesh) -> jax.Array:
    """(B, T) to (n, B / n, T), each piece with rows of all devices, so that no row moves."""
    if n == 1:
        return x[None]
    axes = sharding.RULES["batch"]
    x = x.reshape(sharding.split(mesh, axes), n, -1, x.shape[1])  # [device, piece, row, T]
    pieces = x.swapaxes(0, 1).reshape(n, -1, x.shape[3])
    return jax.lax.with_sharding_constraint(pieces, NamedSharding(mesh, P(None, axes)))


def mean_over_pieces(
    loss_and_grads: Callable[..., tuple[jax.Array, optax.Params]],
    params: optax.Params,
    pieces: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, optax.Params]:
    """Loss and gradients of the rows of all pieces, in the memory of one; float32 sums."""
    n = len(pieces[0])
    if n == 1:
        return loss_and_grads(params, *(x[0] for x in pieces))

    def add(total: Any, piece: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, loss_and_grads(params, *piece)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))  # parameters are float32
    total, _ = jax.lax.scan(add, zeros, pieces)
    return jax.tree.map(lambda x: x / n, total)
