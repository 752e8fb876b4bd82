"""One optimizer step: the model as a function, gradients over micro-batches, and the update.

Nothing here makes arrays when it is called.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from examples.trainer.models.language_model import Forward, LanguageModel
from examples.trainer.models.layers import Layout
from examples.trainer.settings.model import ModelConfig
from examples.trainer.training import sharding
from examples.trainer.training.optimizers import Rates

Seed = int | jax.Array
Result = TypeVar("Result")

Loss = Callable[[optax.Params, ArrayLike, ArrayLike], jax.Array]
"""Parameters, inputs and targets (B, T) to nats per token."""


def make_model(
    config: ModelConfig, vocab_size: int, mesh: Mesh
) -> Callable[[optax.Params], LanguageModel]:
    model = nnx.eval_shape(lambda: LanguageModel(config, vocab_size, nnx.Rngs(0), Layout(mesh)))
    graph, _ = nnx.split(model)
    return lambda params: nnx.merge(graph, params)


def make_forward(config: ModelConfig, vocab_size: int, mesh: Mesh) -> Forward:
    model_of = make_model(config, vocab_size, mesh)
    return lambda params, tokens: model_of(params)(jnp.asarray(tokens))


def on_targets(
    measure: Callable[[jax.Array, jax.Array, jax.Array, Layout], Result],
    config: ModelConfig,
    vocab_size: int,
    mesh: Mesh,
) -> Callable[[optax.Params, ArrayLike, ArrayLike], Result]:
    """`head_loss` or `token_scores` as a function of parameters, inputs and targets (B, T)."""
    model_of = make_model(config, vocab_size, mesh)

    def measured(params: optax.Params, inputs: ArrayLike, targets: ArrayLike) -> Result:
        model = model_of(params)
        x = model.hidden(jnp.asarray(inputs))
        return measure(x, model.head(), jnp.asarray(targets), Layout(mesh))

    return measured


def make_init_params(config: ModelConfig, vocab_size: int) -> Callable[[Seed], optax.Params]:
    return lambda seed: nnx.to_pure_dict(
        nnx.state(LanguageModel(config, vocab_size, nnx.Rngs(jax.random.key(seed))), nnx.Param)
    )


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


TrainStep = Callable[[TrainState, Rates, ArrayLike, ArrayLike], tuple[TrainState, Measured]]
"""State, peak rates, inputs and targets to the next state and its figures: `make_train_step`."""


def shardings_of(abstract: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, abstract)


def make_train_step(
    loss_of: Loss,
    optimizer: Callable[[Rates], optax.GradientTransformation],
    abstract: TrainState,
    mesh: Mesh,
    accumulate: int,
) -> TrainStep:
    """One optimizer step, compiled; the memory of the given state is donated to the new one.

    If the loss or the gradient is not finite, the state does not change and the loss is NaN.
    """
    placed = shardings_of(abstract.params)

    def train_step(
        state: TrainState, rates: Rates, inputs: ArrayLike, targets: ArrayLike
    ) -> tuple[TrainState, Measured]:
        rows = (jnp.asarray(inputs), jnp.asarray(targets))
        batches = jax.tree.map(lambda x: micro_batches(x, accumulate, mesh), rows)
        loss, grads = mean_over(batches, jax.value_and_grad(loss_of), state.params, placed)
        norm = optax.tree.norm(grads)
        updates, opt_state = optimizer(rates).update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Elementwise selection instead of a branch, so that the old state's memory can be reused.
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        measured = Measured(jnp.where(finite, loss, jnp.nan), norm)
        return TrainState(params, opt_state, state.key), measured

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(shardings_of(abstract), sharding.replicated(mesh)),
    )


def micro_batches(x: jax.Array, n: int, mesh: Mesh) -> jax.Array:
    """(B, T) to (n, B / n, T); each micro-batch has rows of all devices, so that no row moves."""
    if n == 1:
        return x[None]
    axes = sharding.RULES["batch"]
    x = x.reshape(sharding.shard_count(mesh, axes), n, -1, x.shape[1])  # [device, n, row, T]
    batches = x.swapaxes(0, 1).reshape(n, -1, x.shape[3])
    return jax.lax.with_sharding_constraint(batches, NamedSharding(mesh, P(None, axes)))


def mean_over(
    batches: tuple[jax.Array, jax.Array],
    loss_and_grads: Callable[..., tuple[jax.Array, optax.Params]],
    params: optax.Params,
    placed: Any,
) -> tuple[jax.Array, optax.Params]:
    """Mean loss and gradients over micro-batches, with the memory of one; sums in float32.

    The sums are sharded as `placed` says. The means have the types of the parameters.
    """
    n = len(batches[0])
    if n == 1:
        return loss_and_grads(params, *(x[0] for x in batches))

    def add(total: Any, batch: Any) -> tuple[Any, None]:
        loss, grads = total
        more_loss, more_grads = loss_and_grads(params, *batch)
        grads = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, grads, more_grads), placed)
        return (loss + more_loss, grads), None

    zeros = (jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))
    (loss, grads), _ = jax.lax.scan(add, zeros, batches)
    return loss / n, jax.tree.map(lambda total, x: (total / n).astype(x.dtype), grads, params)
