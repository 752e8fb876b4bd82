"""One optimizer step, and the other compiled functions of a run.

Nothing here makes arrays when it is called.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from examples.trainer.models import sharding
from examples.trainer.models.gpt import GPT
from examples.trainer.models.llama import LLaMA
from examples.trainer.settings.run import ModelConfig, RunConfig
from examples.trainer.training import optimizers
from examples.trainer.training.loss import head_loss
from examples.trainer.training.optimizers import Rates

NETWORKS = {"gpt": GPT, "llama": LLaMA}
Seed = int | jax.Array
Forward = Callable[[optax.Params, ArrayLike], jax.Array]
"""A model as a function: parameters and tokens (B, T) to logits (B, T, V)."""
Loss = Callable[[optax.Params, ArrayLike, ArrayLike], jax.Array]
"""Parameters, inputs and targets (B, T) to nats per token."""


class TrainState(NamedTuple):
    """Everything that changes during training, and the random key; a pytree of arrays."""

    params: optax.Params
    opt_state: optax.OptState
    key: jax.Array
    """The key of the run's seed; a counter is folded in wherever random numbers are needed."""


class Measured(NamedTuple):
    """What is known of a step when it is done."""

    loss: jax.Array
    """Nats per token; NaN if the step was skipped."""
    grad_norm: jax.Array
    """Norm of the whole gradient, before it is clipped."""
    rates: Rates
    """The learning rates of the step."""


class Functions(NamedTuple):
    """The compiled functions of a run, which depend on neither its seed nor its rates."""

    forward: Forward
    abstract: TrainState
    """The shapes, types and shardings of the state."""
    init: Callable[..., TrainState]
    """Seed, and perhaps parameters to begin from, to the state before the first step."""
    train_step: Callable[[TrainState, Rates, ArrayLike, ArrayLike], tuple[TrainState, Measured]]
    """State, peak rates, inputs and targets to the next state and its figures."""
    loss: Loss


def make_functions(config: RunConfig, vocab_size: int, mesh: Mesh) -> Functions:
    """The functions of a run; compiles nothing before they are called."""
    begin = functools.partial(init_params, config.model, vocab_size)
    placed = sharding.of_params(jax.eval_shape(begin, 0), mesh)
    moved = placed if mesh.size > 1 else None
    build = functools.partial(optimizers.build, config.optimizer, config.steps, moved)

    def init(seed: Seed, params: optax.Params | None = None) -> TrainState:
        params = begin(seed) if params is None else params
        return TrainState(params, build(Rates(0.0, 0.0)).init(params), jax.random.key(seed))

    forward, loss = make_forward(config.model, vocab_size, mesh)
    train_step = make_train_step(config, loss, build, placed, mesh)
    shapes = jax.eval_shape(init, 0)
    kept, everywhere = sharding.of_state(shapes, mesh), sharding.replicated(mesh)
    return Functions(
        forward=forward,
        abstract=sharding.abstract(shapes, mesh),
        init=jax.jit(init, out_shardings=kept, donate_argnums=1),  # each device makes its shards
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(kept, everywhere)),
        loss=jax.jit(loss, out_shardings=everywhere),
    )


def init_params(config: ModelConfig, vocab_size: int, seed: Seed) -> optax.Params:
    model = NETWORKS[config.family](config, vocab_size, nnx.Rngs(jax.random.key(seed)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def make_forward(config: ModelConfig, vocab_size: int, mesh: Mesh) -> tuple[Forward, Loss]:
    """A network as functions of its parameters: to logits, and to the loss."""
    network = NETWORKS[config.family]
    graph, _ = nnx.split(nnx.eval_shape(lambda: network(config, vocab_size, nnx.Rngs(0))))

    def forward(params: optax.Params, tokens: ArrayLike) -> jax.Array:
        with sharding.on(mesh):
            return nnx.merge(graph, sharding.gathered(params))(jnp.asarray(tokens))

    def loss(params: optax.Params, inputs: ArrayLike, targets: ArrayLike) -> jax.Array:
        with sharding.on(mesh):
            model = nnx.merge(graph, sharding.gathered(params))
            return head_loss(model.hidden(jnp.asarray(inputs)), model.head(), jnp.asarray(targets))

    return forward, loss


def make_train_step(
    config: RunConfig,
    loss: Loss,
    build: Callable[[Rates], optax.GradientTransformation],
    placed: Any,
    mesh: Mesh,
) -> Callable[..., tuple[TrainState, Measured]]:
    """A step; `build` makes the optimizer, `placed` has the shardings of the parameters."""

    def train_step(
        state: TrainState, rates: Rates, inputs: ArrayLike, targets: ArrayLike
    ) -> tuple[TrainState, Measured]:
        pieces = [micro_batches(jnp.asarray(x), config.accumulate, mesh) for x in (inputs, targets)]
        value, grads = mean_over(pieces, jax.value_and_grad(loss), state.params, placed)
        norm = optax.tree.norm(grads)
        updates, opt_state = build(rates).update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        # Elementwise selection instead of a branch, so that the old state's memory can be reused.
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        now = optimizers.rates_at(config.optimizer, config.steps, rates, state.opt_state)
        measured = Measured(jnp.where(finite, value, jnp.nan), norm, now)
        return TrainState(params, opt_state, state.key), measured

    return train_step


def micro_batches(x: jax.Array, n: int, mesh: Mesh) -> jax.Array:
    """(B, T) to (n, B / n, T); each micro-batch has rows of all devices, so that no row moves."""
    if n == 1:
        return x[None]
    x = x.reshape(sharding.shard_count(mesh, sharding.BATCH), n, -1, x.shape[1])
    batches = x.swapaxes(0, 1).reshape(n, -1, x.shape[3])  # of [device, n, row, T]
    return jax.lax.with_sharding_constraint(batches, NamedSharding(mesh, P(None, sharding.BATCH)))


def mean_over(
    batches: list[jax.Array],
    loss_and_grads: Callable[..., tuple[jax.Array, optax.Params]],
    params: optax.Params,
    placed: Any,
) -> tuple[jax.Array, optax.Params]:
    """Mean loss and gradients over micro-batches; sums are in float32, and sharded as `placed`."""
    n = len(batches[0])
    if n == 1:
        return loss_and_grads(params, *(x[0] for x in batches))

    def add(total: Any, batch: Any) -> tuple[Any, None]:
        loss, grads = total
        more_loss, more_grads = loss_and_grads(params, *batch)
        grads = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, grads, more_grads), placed)
        return (loss + more_loss, grads), None

    zeros = (jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))
    (loss, grads), _ = jax.lax.scan(add, zeros, tuple(batches))
    return loss / n, jax.tree.map(lambda total, x: (total / n).astype(x.dtype), grads, params)
