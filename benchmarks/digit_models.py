"""An MLP, a CNN and a ViT in Flax Linen for scikit-learn's digits, as a user's script has them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from examples.trainer.system import optional_packages

TRAIN = 1400  # images for training; 397 more are for tests


class Images(NamedTuple):
    """Images (number, 8, 8, 1) with entries from 0 to 1, and the digits that they show."""

    pixels: np.ndarray
    digits: np.ndarray


class MLP(nn.Module):
    """A wide hidden layer and a narrow one, so that one matrix has more outputs and one fewer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits (batch, 10)."""
        for width in (256, 64):
            x = nn.relu(nn.Dense(width)(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


class CNN(nn.Module):
    """Two convolutions and a dense layer, all with more inputs than outputs but the first."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits (batch, 10)."""
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


class ViT(nn.Module):
    """Two blocks of attention and an MLP over 16 patches of 2 x 2 pixels."""

    width: int = 32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits (batch, 10)."""
        x = nn.Conv(self.width, (2, 2), strides=2, name="patches")(x).reshape(len(x), 16, -1)
        x = x + self.param("pos_embed", nn.initializers.normal(0.02), (1, 16, self.width))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(axis=1))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "cnn": CNN, "vit": ViT}


@functools.cache
def read_images() -> tuple[Images, Images]:
    """Images to train on and to test on, in an order that is the same in every run."""
    datasets = optional_packages.load("sklearn.datasets", "--task with digits", "yardsticks")
    pixels, digits = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    pixels = (pixels[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    digits = digits[order].astype(np.int32)
    return Images(pixels[:TRAIN], digits[:TRAIN]), Images(pixels[TRAIN:], digits[TRAIN:])


def random_batches(images: Images, steps: int, batch: int, seed: int) -> list[Images]:
    """Rows at random places, a batch for each step."""
    rows = np.random.default_rng(seed).integers(len(images.digits), size=(steps, batch))
    return [Images(images.pixels[row], images.digits[row]) for row in rows]


def loss_of(apply_fn: Any, params: Any, images: Images) -> jax.Array:
    """Mean cross-entropy in nats."""
    logits = apply_fn({"params": params}, images.pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, images.digits).mean()


@jax.jit
def train_step(state: TrainState, images: Images) -> TrainState:
    """One step of training."""
    grads = jax.grad(lambda params: loss_of(state.apply_fn, params, images))(state.params)
    return state.apply_gradients(grads=grads)


@jax.jit
def evaluate(state: TrainState, images: Images) -> jax.Array:
    """The loss of all images."""
    return jnp.asarray(loss_of(state.apply_fn, state.params, images))


class Task:
    """A network, and images for a training of some steps."""

    train_step = staticmethod(train_step)
    evaluate = staticmethod(evaluate)

    def __init__(self, name: str, steps: int, batch: int):
        """Takes the name of a network of ``MODELS``."""
        self.images, self.validation = read_images()
        self.model = MODELS[name]()
        self.example = self.images.pixels[:1]
        self.sizes = (steps, batch)

    def batches(self, seed: int) -> list[Images]:
        """A batch of images for each step."""
        return random_batches(self.images, *self.sizes, seed)
