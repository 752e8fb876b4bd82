"""Three networks on scikit-learn's digits, one name changed: `python -m lab.benchmarks.digits`.

An MLP, a CNN and a ViT in Flax Linen are trained with warm-up, cosine, clipping and weight decay.
Only the optimizer differs, and the second rate, for parameters that are not matrices. If it is left
out, it is the matrices' rate. For a seed all methods have the same initial parameters and batches.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import optax_muonplus as omp
from lab.benchmarks import columns, records

TRAIN = 1400  # images to train on; 397 more are for validation
METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "optax.contrib.muon": optax.contrib.muon,
    "omp.muonplus": omp.muonplus,
    "optax.adamw": optax.adamw,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The network, its training, and the grid."""

    task: Literal["mlp", "cnn", "vit"] = "mlp"
    """The network."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Some of optax.contrib.muon, omp.muonplus and optax.adamw."""
    rates: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
    """Peak learning rates; optax.adamw gets a tenth of each."""
    second_rates: tuple[float, ...] = (0.0, 0.003, 0.01, 0.03)
    """Peak learning rates of other parameters; 0 leaves the argument out."""
    seeds: tuple[int, ...] = tuple(range(8))
    """Seeds of the initial parameters and of the batches."""
    steps: int = 100
    """Steps of a run; the first tenth of them is the warm-up."""
    batch_size: int = 64
    """Images in a step."""
    weight_decay: float = 0.1
    """Weight decay of all parameters."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


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


def main(config: Config) -> None:
    """Trains and prints the mean loss of each method at each rate; writes all losses as JSON."""
    script, found, table = Script(config), [], []
    for method in config.methods:
        plain = method == "optax.adamw"  # one rate for all parameters
        for second in (0.0,) if plain else config.second_rates:
            row: dict[str, Any] = {"method": f"{method}, {second:g}" if second else method}
            for rate in config.rates:
                train = script.training(
                    script.optimizer(method, rate / (10 if plain else 1), second)
                )
                losses = [train(seed) for seed in config.seeds]
                row[f"{rate:g}"] = statistics.fmean(losses)
                found.append({"method": method, "rate": rate, "second": second, "losses": losses})
            print(row, flush=True)
            table.append(row)
    shown = [columns.number(f"{rate:g}", f"{rate:g}", 4) for rate in config.rates]
    print(columns.table(table, [columns.word("method", "method"), *shown]))
    record = records.describe_run("lab.benchmarks.digits", config) | {"rows": found}
    records.write(config.out, f"digits-{config.task}-{jax.default_backend()}", record)


class Script:
    """The user's script, as functions of the optimizer and the seed."""

    def __init__(self, config: Config):
        self.config, self.model = config, MODELS[config.task]()
        self.train_images, self.held_out = read_images()
        example = self.held_out[0][:1]
        self.init = jax.jit(lambda seed: self.model.init(jax.random.key(seed), example)["params"])
        # Without them Optax takes the head and the position table for matrices, which have two
        # axes, and no attention kernel or convolution, which have three and four.
        self.matrices = omp.muon_dimension_numbers(self.init(0))

    def optimizer(self, method: str, rate: float, second: float) -> optax.GradientTransformation:
        """Clipping, and the optimizer with the arguments that all methods share."""
        given: dict[str, Any] = {"weight_decay": self.config.weight_decay}
        if method != "optax.adamw":
            given["adam_weight_decay"] = self.config.weight_decay
            given["muon_weight_dimension_numbers"] = self.matrices
        if second:
            given["adam_learning_rate"] = self.schedule(second)
        tx = METHODS[method](self.schedule(rate), **given)
        return optax.chain(optax.clip_by_global_norm(1.0), tx)

    def schedule(self, peak: float) -> optax.Schedule:
        """From zero to the peak in a tenth of the steps, and back along a cosine."""
        steps = self.config.steps
        return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)

    def loss(self, params: Any, images: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Mean cross-entropy in nats."""
        pixels, digits = images
        logits = self.model.apply({"params": params}, pixels)
        losses = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), digits)
        return losses.mean()

    def training(self, tx: optax.GradientTransformation) -> Callable[[int], float]:
        """Makes the function of a seed that trains and returns the loss of held-out images.

        Seeds share what is compiled.
        """
        pixels, digits = map(jnp.asarray, self.train_images)

        @jax.jit
        def step(params: Any, state: Any, rows: jax.Array) -> tuple[Any, Any]:
            grads = jax.grad(self.loss)(params, (pixels[rows], digits[rows]))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def train(seed: int) -> float:
            sizes = (self.config.steps, self.config.batch_size)
            params = self.init(seed)
            state = jax.jit(tx.init)(params)
            for rows in np.random.default_rng(seed).integers(len(digits), size=sizes):
                params, state = step(params, state, rows)
            return float(self.loss(params, self.held_out))

        return train


@functools.cache
def read_images() -> tuple[Any, Any]:
    """Images (number, 8, 8, 1) from 0 to 1 and their digits, to train on and to hold out."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise SystemExit("The images are scikit-learn's: pip install scikit-learn") from None
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    pixels = (pixels[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    digits = digits[order].astype(np.int32)
    return (pixels[:TRAIN], digits[:TRAIN]), (pixels[TRAIN:], digits[TRAIN:])


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m lab.benchmarks.digits", description=__doc__))
