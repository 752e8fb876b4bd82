"""MNIST-1D (arXiv:2011.14439): an MLP and a CNN with Muon, Muon+ and AdamW.

Data, networks, steps and batches are those of greydanus/mnist1d @7878d96 (`notebooks/models.py`,
`train.py`, `mnist1d-classification.ipynb`), but for Flax' initial values and an order of the rows
that changes in each epoch. A rate is chosen on the last fifth of the training rows; the table has
the accuracy on the test rows after training on all others, at the last step.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_muonplus as omp
from benchmarks import columns, records
from benchmarks.yardsticks import intervals, resuming
from examples.trainer.system import optional_packages
from examples.trainer.system.errors import UserError

PUBLISHED = {"logistic": 32, "MLP": 68, "CNN": 94, "GRU": 91, "human": 96}
PUBLISHED_RATE = 0.01  # Adam's, which is constant there
COLUMNS = (
    columns.word("network", "network"),
    columns.word("method", "method"),
    columns.word("rate", "written_rate"),
    columns.word("test accuracy, %", "accuracy"),
    columns.word("minus AdamW", "difference"),
    columns.word("published", "published"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The grid and the length of a run."""

    rates: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
    """Peak learning rates of the matrices under Muon and Muon+."""
    adamw_rates: tuple[float, ...] = (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
    """Peak learning rates under AdamW."""
    seeds: int = 5
    """Seeds from 0, of initial values and batches; the data are always the same."""
    tuning_seeds: int = 2
    """Seeds from 0 that choose a rate."""
    steps: int = 6000
    """Steps of a run; the rate falls along a cosine."""
    batch_size: int = 100
    """Rows in a step."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


class Data(NamedTuple):
    """Signals (rows, 40) and digits (rows,), to train on and to judge by."""

    x: Any
    y: Any
    x_test: Any
    y_test: Any


class MLP(nnx.Module):
    """Three layers of width 100, the second around a residual."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(40, 100, rngs=rngs)
        self.second = nnx.Linear(100, 100, rngs=rngs)
        self.head = nnx.Linear(100, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps signals (batch, 40) to logits (batch, 10)."""
        x = nnx.relu(self.first(x))
        return self.head(x + nnx.relu(self.second(x)))


class CNN(nnx.Module):
    """Three convolutions of 25 channels that halve the length, and a linear head."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(5, 25, rngs=rngs)
        self.second = nnx.Linear(3 * 25, 25, rngs=rngs)
        self.third = nnx.Linear(3 * 25, 25, rngs=rngs)
        self.head = nnx.Linear(125, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps signals (batch, 40) to logits (batch, 10)."""
        x = nnx.relu(self.first(patches(x[..., None], 5)))
        x = nnx.relu(self.second(patches(x, 3)))
        x = nnx.relu(self.third(patches(x, 3)))
        return self.head(x.reshape(len(x), -1))


def patches(x: jax.Array, width: int) -> jax.Array:
    """What each place of a convolution sees, (batch, places, width * channels).

    The padding is 1 and the stride 2. A linear layer on it is the convolution, with a matrix as its
    kernel; in a loop on a CPU it takes a fifth of the time of XLA's convolution.
    """
    x = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    last = x.shape[1] - width
    return jnp.concatenate([x[:, i : last + i + 1 : 2] for i in range(width)], axis=-1)


NETWORKS: dict[str, Callable[[nnx.Rngs], Any]] = {"MLP": MLP, "CNN": CNN}


def muonplus(rate: Any, steps: int, **options: Any) -> optax.GradientTransformation:
    """Muon+, or Muon; heads and biases get AdamW with the published rate."""
    cosine = functools.partial(optax.cosine_decay_schedule, decay_steps=steps)
    share = cosine(1.0)
    second = cosine(PUBLISHED_RATE)
    return omp.muonplus(lambda step: rate * share(step), adam_learning_rate=second, **options)


def adamw(rate: Any, steps: int) -> optax.GradientTransformation:
    """AdamW without decay, along a cosine."""
    share = optax.cosine_decay_schedule(1.0, steps)
    return optax.adamw(lambda step: rate * share(step), weight_decay=0.0)


METHODS: dict[str, Callable[[Any, int], optax.GradientTransformation]] = {
    "Adam as published": lambda rate, steps: optax.adam(rate),
    "AdamW": adamw,
    "Muon": functools.partial(muonplus, norm="none"),
    "Muon, adam_nesterov=False": functools.partial(muonplus, norm="none", adam_nesterov=False),
    "Muon+ col_row": muonplus,
    "Muon+ col_row, adam_nesterov=False": functools.partial(muonplus, adam_nesterov=False),
    "RECOMMENDED": muonplus,
}
"""From a rate and the number of steps."""


def main(config: Config) -> None:
    """Trains all of them, prints the table and writes all figures as JSON."""
    counts = (config.steps, config.tuning_seeds, config.batch_size)
    if min(counts) < 1 or config.seeds < 2 or min(*config.rates, *config.adamw_rates) <= 0:
        raise UserError("--seeds begins at 2, other counts at 1, and rates are above 0.")
    run = records.describe_run("benchmarks.yardsticks mnist1d", config)
    record = {**run, **intervals.versions("mnist1d", "flax"), "published": PUBLISHED}
    measured = functools.partial(measure, read(), config)
    tasks = [{"network": x, "method": y} for x, y in itertools.product(NETWORKS, METHODS)]
    rows = resuming.measured(config.out, "mnist1d", record, tasks, measured)
    print(columns.table([written(row, rows) for row in rows], COLUMNS, left=2))


def read() -> Data:
    """The 4000 and 1000 rows that the package makes, with its own seed."""
    package = optional_packages.load("mnist1d.data", "MNIST-1D", "yardsticks")
    made = package.make_dataset(package.get_dataset_args())
    x, x_test = (made[name].astype(np.float32) for name in ("x", "x_test"))
    return Data(x, made["y"], x_test, made["y_test"])


def measure(data: Data, config: Config, network: str, method: str) -> dict[str, Any]:
    """Chooses a rate on held-out training rows; accuracies in percent with it, by seed."""
    rates = {"AdamW": config.adamw_rates, "Adam as published": (PUBLISHED_RATE,)}
    tried, kept = rates.get(method, config.rates), len(data.x) * 4 // 5
    held_out = Data(data.x[:kept], data.y[:kept], data.x[kept:], data.y[kept:])
    runs = jax.jit(functools.partial(accuracies, network, method, config))
    found = {
        rate: [float(x) for x in runs(held_out, rate, jnp.arange(config.tuning_seeds))]
        for rate in (tried if len(tried) > 1 else ())
    }
    best = max(found, key=lambda rate: statistics.fmean(found[rate]), default=tried[0])
    return {
        "rate": best,
        "at_end": len(tried) > 1 and best in (min(tried), max(tried)),
        "held_out": {f"{rate:g}": values for rate, values in found.items()},
        "accuracies": [float(x) for x in runs(data, best, jnp.arange(config.seeds))],
    }


def accuracies(
    network: str, method: str, config: Config, data: Data, rate: Any, seeds: jax.Array
) -> jax.Array:
    """Trains with one seed after the other; percent of the test rows that are right."""
    data = Data(*map(jnp.asarray, data))

    def train(seed: jax.Array) -> jax.Array:
        initial, shuffles = jax.random.split(jax.random.key(seed))
        graph, params = nnx.split(NETWORKS[network](nnx.Rngs(initial)))
        tx = METHODS[method](rate, config.steps)

        def loss_of(params: Any, rows: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, params)(data.x[rows])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, data.y[rows])
            return losses.mean()

        def step(carry: Any, rows: jax.Array) -> tuple[Any, None]:
            params, state = carry
            updates, state = tx.update(jax.grad(loss_of)(params, rows), state, params)
            return (optax.apply_updates(params, updates), state), None

        batches = orders(shuffles, len(data.x), config)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), batches)
        guesses = nnx.merge(graph, params)(data.x_test).argmax(-1)
        return 100 * jnp.mean(guesses == data.y_test)

    return jax.lax.map(train, seeds)


def orders(key: jax.Array, rows: int, config: Config) -> jax.Array:
    """Rows of each batch (steps, batch): every epoch has an order of its own."""
    in_epoch = rows // config.batch_size
    keys = jax.random.split(key, -(-config.steps // in_epoch))
    shuffled = jax.vmap(lambda key: jax.random.permutation(key, rows))(keys)
    return shuffled[:, : in_epoch * config.batch_size].reshape(-1, config.batch_size)[
        : config.steps
    ]


def written(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, str]:
    """The cells of a row; differences are paired by seed."""
    (base,) = (x for x in rows if (x["network"], x["method"]) == (row["network"], "AdamW"))
    gaps = [a - b for a, b in zip(row["accuracies"], base["accuracies"], strict=True)]
    return {
        "network": row["network"],
        "method": row["method"],
        "written_rate": f"{row['rate']:g}{'*' * row['at_end']}",
        "accuracy": intervals.written(row["accuracies"], 1),
        "difference": "" if row is base else intervals.written(gaps, 1),
        "published": str(PUBLISHED[row["network"]]) if "published" in row["method"] else "",
    }
