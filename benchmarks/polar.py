"""Accuracy of polar factors against time: `python -m benchmarks.polar`, `--help` for more."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure  # not pyplot, which may need a display
from matplotlib.ticker import LogLocator

from benchmarks import columns, records, timing
from examples.trainer.runs.report import INK, save_figure
from optax_muonplus import polar
from optax_muonplus.matrices import normalize_matrix

# Each table of coefficients with its usual number of steps; those with more rows also with more.
RUNS = (
    ("jordan", 5), ("you", 5), ("you", 6), ("dion", 5),
    ("polar_express", 5), ("polar_express", 6), ("polar_express", 8),
    ("cubic", 5),
)  # fmt: skip
METHODS = (("newton_schulz", "float32"), ("gram", "float32"), ("newton_schulz", "bfloat16"))
# The palette of Okabe and Ito, which readers with any colour vision can tell apart.
COLOURS = {
    ("newton_schulz", "float32"): "#0072B2",
    ("gram", "float32"): "#D55E00",
    ("newton_schulz", "bfloat16"): "#009E73",
    ("svd", "float32"): INK,
}
MARKS = {
    "jordan": "o", "you": "s", "dion": "^", "polar_express": "D",
    "cubic": "X", "exact": "*",
}  # fmt: skip


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
    """Folder for the JSON file and the picture; nothing is written without it."""


def main(config: Config) -> None:
    """Measures and prints the table; writes it as JSON and draws it."""
    inputs = spectra(config)
    functions = {("exact", 0, "svd", "float32"): jax.jit(polar.svd)}
    for (method, dtype), (table, steps) in itertools.product(METHODS, RUNS):
        options = polar.Orthogonalize(table, steps, polar=method, compute_dtype=dtype)
        functions[table, steps, method, dtype] = jax.jit(polar.FastPolar(options))
    gaussian = inputs["gaussian"][0]
    programs = {name: functools.partial(f, gaussian) for name, f in functions.items()}
    seconds = timing.interleaved(programs, config.rounds)
    rows = [
        dict(zip(("table", "steps", "method", "dtype"), name, strict=True))
        | {"ms_per_matrix": 1e3 * float(np.median(seconds[name])) / config.count}
        | {kind: accuracy(f(x), exact) for kind, (x, exact) in inputs.items()}
        for name, f in functions.items()
    ]
    print(columns.table(rows, COLUMNS, left=4))
    if config.out is not None:
        name = f"polar-{config.short}x{config.long}-{jax.default_backend()}"
        record = {**records.describe_run("benchmarks.polar", config), "rows": rows}
        records.write(config.out, name, record)
        draw(rows, config, config.out / f"{name}.png")


def spectra(config: Config) -> dict[str, tuple[jax.Array, np.ndarray]]:
    """Makes matrices with two kinds of spectrum, and their exact polar factors in float64."""
    random = np.random.default_rng(0)
    x = random.standard_normal((config.count, config.short, config.long))
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    spread = np.logspace(0, np.log10(config.smallest), s.shape[-1])
    exact = u @ vh
    inputs = {"gaussian": x, "log-spaced": (u * spread) @ vh}
    return {kind: (jnp.asarray(x, jnp.float32), exact) for kind, x in inputs.items()}


def accuracy(result: jax.Array, exact: np.ndarray) -> dict[str, float]:
    """Measures the relative distance to the exact factor, and the spread of norms."""
    o = np.asarray(result, np.float64)
    return {
        "distance": float(np.linalg.norm(o - exact) / np.linalg.norm(exact)),
        **spreads(o, ""),
        **spreads(np.asarray(normalize_matrix(result, "col_row"), np.float64), "_after"),
    }


def spreads(x: np.ndarray, suffix: str) -> dict[str, float]:
    """Divides the largest norm of rows and of columns by the smallest."""
    rows, columns = np.linalg.norm(x, axis=-1), np.linalg.norm(x, axis=-2)
    return {
        f"row_spread{suffix}": float(np.max(rows.max(-1) / rows.min(-1))),
        f"col_spread{suffix}": float(np.max(columns.max(-1) / columns.min(-1))),
    }


def of_log_spaced(heading: str, key: str, form: str = ".4f") -> columns.Column:
    """Makes a column of figures of the log-spaced spectrum."""
    return heading, lambda row: f"{row['log-spaced'][key]:{form}}"


COLUMNS = (
    columns.word("table", "table"),
    ("steps", lambda row: str(row["steps"] or "")),
    columns.word("method", "method"),
    columns.word("products", "dtype"),
    columns.number("ms a matrix", "ms_per_matrix"),
    ("distance, Gaussian", lambda row: f"{row['gaussian']['distance']:.2e}"),
    of_log_spaced("distance, log-spaced", "distance", ".2e"),
    of_log_spaced("row spread", "row_spread"),
    of_log_spaced("after", "row_spread_after"),
    of_log_spaced("col spread", "col_spread"),
    of_log_spaced("after", "col_spread_after"),
)


def draw(rows: list[dict[str, Any]], config: Config, path: Path) -> None:
    """Draws time against distance to the exact factor, for both spectra."""
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {
        "gaussian": "Gaussian matrices",
        "log-spaced": f"singular values log-spaced, 1 to {config.smallest:g}",
    }
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        for row in rows:
            axes.scatter(
                row["ms_per_matrix"],
                row[kind]["distance"],
                s=10 * (row["steps"] or 5),
                color=COLOURS[row["method"], row["dtype"]],
                marker=MARKS[row["table"]],
                alpha=0.8,
            )
        axes.set(xscale="log", yscale="log", xlabel="milliseconds a matrix", title=title)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative distance to the exact polar factor")
    for (method, dtype), colour in COLOURS.items():
        panels[1].scatter([], [], color=colour, marker="s", label=f"{method}, {dtype}")
    for table, mark in MARKS.items():
        panels[1].scatter([], [], color="#777777", marker=mark, label=table)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    processor = records.describe_machine()["processor"]
    figure.suptitle(f"{config.short} x {config.long} on {processor}. Larger marks: more steps")
    save_figure(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.polar", description=__doc__))
