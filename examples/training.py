"""The pure parts of training: the model as a function, the first state, one step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from examples import models, optimizers, sharding
from examples.config import OptimizerConfig
from examples.loss import next_token_loss
from examples.models.config import ModelConfig
from examples.optimizers import Rates

Extend = Callable[[optax.Params, ArrayLike, Any, jax.Array | int], tuple[jax.Array, Any]]
"""Parameters, tokens (B, T), the past of `examples.models.attention` or None, and the position of
the first token to logits (B, T, V) and the past with these tokens."""

Loss = Callable[[optax.Params, ArrayLike, ArrayLike], jax.Array]
"""Parameters, inputs and targets (B, T) to nats per token."""


class TrainState(NamedTuple):
    """All that changes during training, and the random key; a plain pytree of arrays."""

    params: optax.Params
    opt_state: optax.OptState
    key: jax.Array
    """The run's own, from its seed; what needs a random number folds a counter into it."""


Seed = int | jax.Array

Init = Callable[[Seed], TrainState]
"""Seed to the state before the first step."""

TrainStep = Callable[[TrainState, Rates, ArrayLike, ArrayLike], tuple[TrainState, jax.Array]]
"""State, peak rates, inputs and targets to the next state and the loss; see `make_train_step`."""


def make_extend(config: ModelConfig, vocab_size: int, mesh: Mesh) -> Extend:
    """The model as a function of its parameters; makes no arrays."""
    model = nnx.eval_shape(lambda: models.build(config, vocab_size, nnx.Rngs(0)))
    graph, _ = nnx.split(model)

    def extend(
        params: optax.Params, tokens: ArrayLike, past: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, sharding.gather_tables(params, mesh))
        return model.extend(jnp.asarray(tokens), past, start)

    return extend


def make_init_params(config: ModelConfig, vocab_size: int) -> Callable[[Seed], optax.Params]:
    """The first parameters as a function of the seed."""
    return lambda seed: nnx.to_pure_dict(
        nnx.state(models.build(config, vocab_size, nnx.Rngs(jax.random.key(seed))), nnx.Param)
    )


def make_init(
    init_params: Callable[[Seed], optax.Params], optimizer: optax.GradientTransformation
) -> Init:
    """The state before the first step as a function of the seed."""

    def init(seed: Seed) -> TrainState:
        params = init_params(seed)
        return TrainState(params, optimizer.init(params), jax.random.key(seed))

    return init


def abstract_state(init: Init, mesh: Mesh) -> TrainState:
    """The shapes, types and places of the arrays of a state; makes none of them."""
    shapes = jax.eval_shape(init, 0)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        sharding.of_state(shapes, mesh),
    )


def places(abstract: Any) -> Any:
    """The sharding of each array."""
    return jax.tree.map(lambda x: x.sharding, abstract)


def place_init(init: Init, abstract: TrainState) -> Init:
    """`init`, compiled: each device makes what it keeps, and no more."""
    return jax.jit(init, out_shardings=places(abstract))


def make_train_step(
    loss_of: Loss,
    optimizer: Callable[[Rates], optax.GradientTransformation],
    abstract: TrainState,
    mesh: Mesh,
    accumulate: int,
) -> TrainStep:
    """One optimizer step, compiled; it gives up the memory of the state it is given.

    Where the loss or the gradient is not finite the state stays as it was, and the loss is NaN.
    """

    def train_step(
        state: TrainState, rates: Rates, inputs: ArrayLike, targets: ArrayLike
    ) -> tuple[TrainState, jax.Array]:
        rows = (jnp.asarray(inputs), jnp.asarray(targets))
        pieces = jax.tree.map(lambda x: cut_rows(x, accumulate, mesh), rows)
        loss, grads = mean_over_pieces(jax.value_and_grad(loss_of), state.params, pieces)
        updates, opt_state = optimizer(rates).update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
        # A choice of numbers and no branch: the old state need not outlive the new one.
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        return TrainState(params, opt_state, state.key), jnp.where(finite, loss, jnp.nan)

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


@dataclass(frozen=True)
class Program:
    """What is compiled for a run: it serves all runs that differ in seed and rates only."""

    extend: Extend
    abstract: TrainState
    """The shapes, types and places of the state."""
    init: Init
    train_step: TrainStep
    loss: Loss


@functools.lru_cache(maxsize=1)  # a sweep takes runs of one program one after the other
def make_program(
    model: ModelConfig,
    rule: OptimizerConfig,
    steps: int,
    accumulate: int,
    vocab_size: int,
    mesh: Mesh,
) -> Program:
    """The functions of a run; compiles nothing before they are called."""
    extend = make_extend(model, vocab_size, mesh)
    init_params = make_init_params(model, vocab_size)
    places_of_params = sharding.of_params(jax.eval_shape(init_params, 0), mesh)

    def optimizer(rates: Rates) -> optax.GradientTransformation:
        moved = places_of_params if mesh.size > 1 else None
        return optimizers.build(rule, steps, moved, rates)

    def loss(params: optax.Params, inputs: ArrayLike, targets: ArrayLike) -> jax.Array:
        logits, _ = extend(params, inputs, None, 0)
        return next_token_loss(logits, targets)

    init = make_init(init_params, optimizer(Rates(0.0, 0.0)))
    abstract = abstract_state(init, mesh)
    return Program(
        extend=extend,
        abstract=abstract,
        init=place_init(init, abstract),
        train_step=make_train_step(loss, optimizer, abstract, mesh, accumulate),
        loss=jax.jit(loss, out_shardings=sharding.replicated(mesh)),
    )
