"""A character model in Flax Linen, and its training, as a user's script has them."""

import functools
import math
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from examples.trainer.system.errors import UserError

HELD_OUT = 10  # every tenth file is validation text
VALIDATION_BATCHES = 48


class Text(NamedTuple):
    """Characters as numbers from 0 to ``vocabulary``."""

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int


class Block(nn.Module):
    """Attention and an MLP, each with a LayerNorm before it."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        width = x.shape[-1]
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class Model(nn.Module):
    """A transformer with learned positions."""

    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (batch, length, vocabulary)."""
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        start = nn.initializers.normal(0.02)
        x = x + self.param("pos_embed", start, (self.context, self.width))[None]
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return nn.Dense(self.vocabulary, name="head")(nn.LayerNorm()(x))


@functools.cache
def read_text() -> Text:
    """The modules of Python's standard library, without packages, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_text("utf-8") for path in sorted(root.glob("*.py"))]
    if len(sources) < HELD_OUT:
        raise UserError(
            f"{root} has {len(sources)} sources, and {HELD_OUT} are needed: run this with a Python"
            " whose standard library is installed as .py files."
        )
    held_out = sources[HELD_OUT - 1 :: HELD_OUT]
    del sources[HELD_OUT - 1 :: HELD_OUT]
    validation, train = "".join(held_out), "".join(sources)
    codes = np.frombuffer((train + validation).encode("utf-32-le"), np.uint32)
    characters, numbers = np.unique(codes, return_inverse=True)
    return Text(numbers[: len(train)], numbers[len(train) :], len(characters))


def random_batches(text: np.ndarray, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """Windows of the text at random places: (steps, batch, length)."""
    steps, batch, length = shape
    starts = np.random.default_rng(seed).integers(len(text) - length + 1, size=(steps, batch, 1))
    return text[starts + np.arange(length)]


def loss_of(apply_fn: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each character after the first, in nats."""
    logits = apply_fn({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> TrainState:
    """One step of training."""
    grads = jax.grad(lambda params: loss_of(state.apply_fn, params, tokens))(state.params)
    return state.apply_gradients(grads=grads)


@jax.jit
def evaluate(state: TrainState, tokens: jax.Array) -> jax.Array:
    """The loss of batches (batches, batch, length)."""
    return jnp.mean(jax.lax.map(lambda rows: loss_of(state.apply_fn, state.params, rows), tokens))


class Task:
    """The model, and text for a training of some steps."""

    train_step = staticmethod(train_step)
    evaluate = staticmethod(evaluate)

    def __init__(self, steps: int, batch: int, sizes: tuple[int, int, int, int]):
        """Takes context, layers, width and heads of the model as ``sizes``."""
        self.text, context = read_text(), sizes[0]
        self.model = Model(self.text.vocabulary, *sizes)
        self.example = np.zeros((1, context), np.int32)
        self.shape = (steps, batch, context + 1)
        shape = (VALIDATION_BATCHES, batch, context + 1)
        if len(self.text.validation) < (needed := math.prod(shape)):
            raise UserError(
                f"validation takes {needed} characters, and {len(self.text.validation)} are held"
                " out: give a smaller --batch-size or --context."
            )
        self.validation = self.text.validation[:needed].reshape(shape)

    def batches(self, seed: int) -> np.ndarray:
        """A batch of windows for each step."""
        return random_batches(self.text.train, self.shape, seed)
