"""Accuracy of polar factors against time: `python -m lab.benchmarks.polar`, `--help` for more."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from lab.benchmarks import columns, parity, records, timing
from optax_muonplus import polar

# Each table of coefficients with its usual number of steps; those with more rows also with more.
RUNS = (
    ("jordan", 5), ("you", 5), ("you", 6), ("dion", 5), ("polar_express", 5), ("polar_express", 6),
    ("polar_express", 8), ("cubic", 5),
)  # fmt: skip
METHODS = (("newton_schulz", "float32"), ("gram", "float32"), ("newton_schulz", "bfloat16"))


@dataclasses.dataclass(frozen=True)
class Config:
    """The matrices, and how often they are timed."""

    short: int = 512
    """Length of the shorter side."""
    long: int = 2048
    """Length of the longer side."""
    count: int = 4
    """How many matrices are stacked in one call."""
    smallest: float = 1e-3
    """Smallest singular value of the log-spaced spectrum; the largest is 1."""
    rounds: int = 7
    """How often each method is timed."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Measures and prints the table; writes it as JSON."""
    inputs = spectra(config)
    functions: dict[tuple[Any, ...], Any] = {("exact", 0, "svd", "float32"): jax.jit(polar.svd)}
    for (method, dtype), (table, steps) in itertools.product(METHODS, RUNS):
        options: Any = {"polar": method, "compute_dtype": dtype}
        factor = polar.FastPolar(polar.Orthogonalize(table, steps, **options))
        functions[table, steps, method, dtype] = jax.jit(factor)
    gaussian = inputs["gaussian"][0]
    programs = {" ".join(map(str, x)): functools.partial(f, gaussian) for x, f in functions.items()}
    seconds = timing.interleaved(programs, config.rounds)
    rows = [
        dict(zip(("table", "steps", "method", "dtype"), name, strict=True))
        | {
            "ms_per_matrix": 1e3
            * float(np.median(seconds[" ".join(map(str, name))]))
            / config.count
        }
        | {kind: parity.distance(f(x), exact) for kind, (x, exact) in inputs.items()}
        for name, f in functions.items()
    ]
    print(columns.table(rows, COLUMNS, left=4))
    record = {**records.describe_run("lab.benchmarks.polar", config), "rows": rows}
    records.write(config.out, f"polar-{config.short}x{config.long}-{jax.default_backend()}", record)


def spectra(config: Config) -> dict[str, tuple[jax.Array, np.ndarray]]:
    """Makes matrices with two kinds of spectrum, and their exact polar factors in float64."""
    random = np.random.default_rng(0)
    x = random.standard_normal((config.count, config.short, config.long))
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    spread = np.logspace(0, np.log10(config.smallest), s.shape[-1])
    exact = u @ vh
    inputs = {"gaussian": x, "log-spaced": (u * spread) @ vh}
    return {kind: (jnp.asarray(x, jnp.float32), exact) for kind, x in inputs.items()}


COLUMNS = (
    columns.word("table", "table"),
    ("steps", lambda row: str(row["steps"] or "")),
    columns.word("method", "method"),
    columns.word("products", "dtype"),
    columns.number("ms a matrix", "ms_per_matrix"),
    ("distance, Gaussian", lambda row: f"{row['gaussian']:.2e}"),
    ("distance, log-spaced", lambda row: f"{row['log-spaced']:.2e}"),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m lab.benchmarks.polar", description=__doc__))
