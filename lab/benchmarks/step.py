"""Time, memory and compile time of one update: `python -m lab.benchmarks.step`, or `--help`."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import tyro

import optax_muonplus as omp
from lab.benchmarks import columns, parity, products, records, timing, trees
from lab.benchmarks.compiled import Update, compile_update

ADAMW = "optax.adamw"
REFERENCE = "optax.contrib.muon"
SAME_UPDATE = "omp.muon, Optax's update"
MUON = "omp.muon"
DEEPER = 4  # times as many layers, to see what grows with the depth


@dataclasses.dataclass(frozen=True)
class Config(trees.Options):
    """The update that is measured, and how often."""

    rounds: int = 15
    """How often each update is timed."""


def optimizers(config: Config, shapes: Any) -> dict[str, optax.GradientTransformation]:
    """Makes the optimizers of the table; all treat the same parameters as matrices."""
    dims: dict[str, Any] = {"muon_weight_dimension_numbers": omp.muon_dimension_numbers(shapes)}
    ours: dict[str, Any] = {**dims, "compute_dtype": config.dtype}
    return {
        ADAMW: optax.adamw(0.01),
        REFERENCE: optax.contrib.muon(0.01, **dims),
        SAME_UPDATE: omp.muon(0.01, **ours, **parity.AS_OPTAX),
        MUON: omp.muon(0.01, **ours),
        "omp.muonplus": omp.muonplus(0.01, **ours),
        "omp.muonplus, col_row": omp.muonplus(0.01, **parity.COL_ROW, **ours),
    }


def main(config: Config) -> None:
    """Measures and prints the table; writes it with the machine's description as JSON."""
    shapes = trees.shapes(config.size, config.dtype)
    updates = compile_updates(config, shapes)
    seconds = timing.interleaved(dict(updates), config.rounds)
    rows = {}
    for name, update in updates.items():
        row = update.figures | timings(seconds[name], seconds[REFERENCE], seconds[MUON])
        if name != ADAMW:
            polar: Any = "newton_schulz" if name == REFERENCE else "auto"
            operations = products.operations(config.size, polar, config.dtype)
            row |= {"gflop": operations / 1e9, "gflop_per_s": operations / row["median_s"] / 1e9}
        rows[name] = row
    same, reference = updates[SAME_UPDATE](), updates[REFERENCE]()
    difference = parity.largest_difference(same, reference, omp.partition_labels(shapes))
    print(columns.table(columns.named(rows), COLUMNS))
    print(f"matrices of {SAME_UPDATE} against {REFERENCE}: {difference:.1e} apart at most")
    record = records.describe_run("lab.benchmarks.step", config)
    record |= {"largest_difference": difference, "rows": rows}
    parts = ["step", config.tree, *config.changed, config.dtype, jax.default_backend()]
    records.write(config.out, "-".join(parts), record)


def compile_updates(config: Config, shapes: Any) -> dict[str, Update]:
    """Compiles every row of the table, for the model and for :data:`DEEPER` times its layers."""
    more_layers = config.size._replace(layers=DEEPER * config.size.layers)
    deeper = trees.shapes(more_layers, config.dtype)
    params, grads = trees.random_like(shapes, 0), trees.random_like(shapes, 1)
    deep = optimizers(config, deeper)
    updates = {}
    for name, tx in optimizers(config, shapes).items():
        print(f"compiling {name}")
        updates[name] = Update(tx, params, grads)
        more = compile_update(deep[name], deeper, donated=True).figures()
        updates[name].figures |= {
            "compile_deeper_s": more["compile_s"],
            "temporary_deeper_bytes": more["temporary_bytes"],
        }
    return updates


def timings(seconds: np.ndarray, reference: np.ndarray, muon: np.ndarray) -> dict[str, Any]:
    """Compares times with those of two other updates; ratios are taken within each round."""
    return {
        **timing.median_and_quartiles(seconds),
        "times_faster": float(np.median(reference / seconds)),
        "percent_over_muon": 100 * float(np.median(seconds / muon) - 1),
    }


def over_muon(row: columns.Row) -> str:
    """Writes what the normalization adds, in percent."""
    return f"{row['percent_over_muon']:+.1f}%" if "muonplus" in row["name"] else ""


def milliseconds(row: columns.Row) -> str:
    """Writes the median time and its quartiles."""
    low, high = (1e3 * s for s in row["quartiles_s"])
    return f"{1e3 * row['median_s']:.1f} ({low:.1f}-{high:.1f})"


COLUMNS = (
    columns.word("update", "name"),
    ("ms (quartiles)", milliseconds),
    columns.number("times faster", "times_faster", 2),
    ("over omp.muon", over_muon),
    columns.number("GFLOP", "gflop"),
    columns.number("GFLOP/s", "gflop_per_s", 0),
    columns.number("compile s", "compile_s", 2),
    columns.number(f"{DEEPER}x layers", "compile_deeper_s", 2),
    columns.number("temporary MB", "temporary_bytes", 1, 1e6),
    columns.number(f"{DEEPER}x layers", "temporary_deeper_bytes", 1, 1e6),
    columns.number("state MB", "state_bytes", 1, 1e6),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m lab.benchmarks.step", description=__doc__))
