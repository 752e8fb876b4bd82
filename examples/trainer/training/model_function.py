"""A model as pure functions of its parameters; nothing here makes arrays when it is called."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike

from examples.trainer import models
from examples.trainer.models import Forward
from examples.trainer.models.attention import Attention
from examples.trainer.models.attention_kernels import check_attention
from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig
from examples.trainer.training.loss import head_loss

Seed = int | jax.Array
Result = TypeVar("Result")

Loss = Callable[[optax.Params, ArrayLike, ArrayLike], jax.Array]
"""Parameters, inputs and targets (B, T) to nats per token."""

TrainingLoss = Callable[[optax.Params, ArrayLike, ArrayLike], tuple[jax.Array, dict[str, Any]]]
"""The same, and what else the optimizer gets by name: the largest attention logits, or nothing."""


def make_forward(config: ModelConfig, vocab_size: int, mesh: Mesh) -> Forward:
    model_of = make_model(config, vocab_size, mesh)

    def forward(
        params: optax.Params, tokens: ArrayLike, kv_cache: Any, start: jax.Array | int
    ) -> tuple[jax.Array, Any]:
        return model_of(params).forward(jnp.asarray(tokens), kv_cache, start)

    return forward


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
        x, _ = model.hidden(jnp.asarray(inputs), None, 0)
        return measure(x, model.head(), jnp.asarray(targets), layout_of(config, mesh))

    return measured


def make_training_loss(
    config: ModelConfig, vocab_size: int, mesh: Mesh, measures_logits: bool
) -> TrainingLoss:
    """The loss; with `measures_logits` also the largest logits of heads, by block."""
    model_of = make_model(config, vocab_size, mesh, measures_logits)

    def loss(
        params: optax.Params, inputs: ArrayLike, targets: ArrayLike
    ) -> tuple[jax.Array, dict[str, Any]]:
        model = model_of(params)
        x, kept = model.hidden(jnp.asarray(inputs), None, 0)
        nats = head_loss(x, model.head(), jnp.asarray(targets), layout_of(config, mesh))
        if not measures_logits:
            return nats, {}
        blocks = {"attn": kept} if config.scan else [{"attn": maxima} for maxima in kept]
        return nats, {"max_logits": {"blocks": blocks}}

    return loss


def layout_of(config: ModelConfig, mesh: Mesh) -> Layout:
    return Layout(mesh, config.replica_sum_dtype)


def make_model(
    config: ModelConfig, vocab_size: int, mesh: Mesh, measures_logits: bool = False
) -> Callable[[optax.Params], models.GPT | models.LLaMA]:
    layout = layout_of(config, mesh)
    check_attention(config, layout)
    model = nnx.eval_shape(lambda: models.build(config, vocab_size, nnx.Rngs(0), layout))
    model.set_attributes(Attention, measures=measures_logits)
    graph, _ = nnx.split(model)
    return lambda params: nnx.merge(graph, params)


def make_init_params(config: ModelConfig, vocab_size: int) -> Callable[[Seed], optax.Params]:
    return lambda seed: nnx.to_pure_dict(
        nnx.state(models.build(config, vocab_size, nnx.Rngs(jax.random.key(seed))), nnx.Param)
    )
