"""Time, memory and compile time of one update: `python -m benchmarks.step`, `--help` for more."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from rich.console import Console

import optax_muonplus as omp
from benchmarks import parity, products, records, timing, trees
from benchmarks.products import Product
from examples.trainer.system import tables
from optax_muonplus.matrices import Norm

ADAMW = "optax.adamw"
REFERENCE = "optax.contrib.muon"
SAME_UPDATE = "omp.muon, Optax's update"
MUON = "omp.muon"
PLAIN = "omp.muon, newton_schulz"
DEEPER = 4  # times as many layers, to see what grows with the depth


@dataclasses.dataclass(frozen=True)
class Config:
    """The update that is measured, and how often."""

    tree: Literal["gpt-384", "gpt-small", "llama-350m", "llama-1b"] = "gpt-384"
    """Shapes of the parameters."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters, gradients and the operands of products, in all optimizers."""
    vocabulary: int = 0
    """Rows of an embedding, which AdamW updates in every optimizer of the table; 0 is none."""
    rounds: int = 15
    """How often each update is timed."""
    layers: int | None = None
    """Number of layers, if not the model's own."""
    width: int | None = None
    """Width, if not the model's own; the feed-forward width is scaled with it."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def optimizers(config: Config, dimension_numbers: Any) -> dict[str, optax.GradientTransformation]:
    """The optimizers of the table; all treat the same parameters as matrices."""
    dims: dict[str, Any] = {"muon_weight_dimension_numbers": dimension_numbers}
    ours: dict[str, Any] = {
        **dims,
        "compute_dtype": None if config.dtype == "float32" else config.dtype,
    }
    norms: tuple[Norm, ...] = ("col", "row", "col_row", "row_col")
    return {
        ADAMW: optax.adamw(0.01),
        REFERENCE: optax.contrib.muon(0.01, **dims),
        SAME_UPDATE: omp.muon(0.01, **ours, **parity.AS_OPTAX),
        MUON: omp.muon(0.01, **ours),
        PLAIN: omp.muon(0.01, polar="newton_schulz", **ours),
        **{f"omp.muonplus, {norm}": omp.muonplus(0.01, norm=norm, **ours) for norm in norms},
    }


def main(config: Config) -> None:
    """Measures and prints the table; writes it with the machine's description as JSON."""
    console = Console(width=max(Console().width, 180))  # the table is wide
    size = trees.resized(trees.SIZES[config.tree], config.layers, config.width)
    updates = compile_updates(config, size, console)
    chains = products.chains(size, config.dtype)
    programs: dict[str, Callable[[], Any]] = {name: x.run for name, x in updates.items()}
    programs |= {name: chain.run for name, chain in chains.items()}
    seconds = timing.interleaved(programs, config.rounds, console)
    per_product = products.seconds_of_each(chains, seconds)
    rows = {}
    for name, update in updates.items():
        row = update.figures | timings(seconds[name], seconds[REFERENCE], seconds[MUON])
        if name != ADAMW:
            polar = "newton_schulz" if name in (REFERENCE, PLAIN) else "auto"
            row |= work(size, config.dtype, polar, per_product, row["median_s"])
        rows[name] = row
    record = {
        **records.describe_run("benchmarks.step", config),
        "largest_difference": parity.largest_difference(
            updates[SAME_UPDATE].run()[0],
            updates[REFERENCE].run()[0],
            omp.partition_labels(trees.shapes(size, config.vocabulary, config.dtype)),
        ),
        "products": {
            "x".join(map(str, product)): {"gflop_per_s": 2 * math.prod(product) / s / 1e9}
            for product, s in per_product.items()
        },
        "rows": rows,
    }
    show(console, record)
    changed = [f"{name}{value}" for name in ("width", "layers") if (value := getattr(config, name))]
    parts = ["step", config.tree, *changed, config.dtype, jax.default_backend()]
    records.write(config.out, "-".join(parts), record, console)


@dataclasses.dataclass
class CompiledUpdate:
    """An update ready to run, and what its compilation tells.

    The state is donated, as in a training loop: each run goes on from the state of the one before.
    """

    program: Callable[..., Any]
    grads: Any
    state: Any
    params: Any
    figures: dict[str, Any]

    def run(self) -> Any:
        """The updates, and the new state."""
        updates, self.state = self.program(self.grads, self.state, self.params)
        return updates, self.state


def compile_updates(
    config: Config, size: trees.Size, console: Console
) -> dict[str, CompiledUpdate]:
    """Compiles every row of the table, for the model and for :data:`DEEPER` times its layers."""
    shapes = trees.shapes(size, config.vocabulary, config.dtype)
    more_layers = size._replace(layers=DEEPER * size.layers)
    deeper = trees.shapes(more_layers, config.vocabulary, config.dtype)
    params, grads = trees.random_like(shapes, 0), trees.random_like(shapes, 1)
    deep = optimizers(config, omp.muon_dimension_numbers(deeper))
    updates = {}
    for name, tx in optimizers(config, omp.muon_dimension_numbers(shapes)).items():
        console.print(f"compiling {name}")
        compiled, seconds = compile_update(tx, shapes)
        more, more_seconds = compile_update(deep[name], deeper)
        state = jax.jit(tx.init)(params)
        figures = {
            "compile_s": seconds,
            "compile_deeper_s": more_seconds,
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "temporary_deeper_bytes": more.memory_analysis().temp_size_in_bytes,
            "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        }
        updates[name] = CompiledUpdate(compiled, grads, state, params, figures)
    return updates


def compile_update(tx: optax.GradientTransformation, shapes: Any) -> tuple[Any, float]:
    """The compiled update, whose state is donated, and the seconds that it took.

    Tracing, lowering and compiling are in them.
    """
    state = jax.eval_shape(tx.init, shapes)
    begin = time.perf_counter()
    compiled = jax.jit(tx.update, donate_argnums=1).lower(shapes, state, shapes).compile()
    return compiled, time.perf_counter() - begin


def timings(seconds: np.ndarray, reference: np.ndarray, muon: np.ndarray) -> dict[str, Any]:
    """Median, quartiles and ratios to two other updates; ratios are taken within each round."""
    return {
        **timing.median_and_quartiles(seconds),
        "times_faster": float(np.median(reference / seconds)),
        "percent_over_muon": 100 * float(np.median(seconds / muon) - 1),
    }


def work(
    size: trees.Size,
    dtype: str,
    polar: Literal["auto", "newton_schulz"],
    per_product: dict[Product, float],
    seconds: float,
) -> dict[str, float]:
    """Operations of the method's products, and the share of the update's time that they take.

    Args:
      size: of the model.
      dtype: of the products' operands.
      polar: the method, as in :func:`optax_muonplus.muon`.
      per_product: seconds of each product on its own.
      seconds: of the whole update.
    """
    needed = products.needed(size, polar, None if dtype == "float32" else dtype)
    operations = products.flops(needed)
    alone = sum(count * per_product[product] for product, count in needed.items())
    return {
        "gflop": operations / 1e9,
        "gflop_per_s": operations / seconds / 1e9,
        "share_of_products": alone / seconds,
    }


def show(console: Console, record: dict[str, Any]) -> None:
    """Prints the table in Markdown, ready for the README."""
    header = [
        "update", "ms (quartiles)", "times faster", "over omp.muon",
        "GFLOP", "GFLOP/s", "of products", "compile s",
        f"{DEEPER}x layers", "temporary MB", f"{DEEPER}x layers", "state MB",
    ]  # fmt: skip
    lines = []
    for name, row in record["rows"].items():
        low, high = (1e3 * s for s in row["quartiles_s"])
        work = [f"{row[k]:.{d}f}" if k in row else "" for k, d in _WORK]
        line = [
            name,
            f"{1e3 * row['median_s']:.1f} ({low:.1f}-{high:.1f})",
            f"{row['times_faster']:.2f}",
            f"{row['percent_over_muon']:+.1f}%" if "muonplus" in name else "",
            *work,
            f"{row['compile_s']:.2f}",
            f"{row['compile_deeper_s']:.2f}",
            *(f"{row[k] / 1e6:.1f}" for k in _BYTES),
        ]
        lines.append(line)
    console.out(tables.markdown(header, lines))
    for product, rate in record["products"].items():
        console.print(f"products alone, {product}: {rate['gflop_per_s']:.0f} GFLOP/s")
    difference = record["largest_difference"]
    console.print(f"matrices of {SAME_UPDATE} against {REFERENCE}: {difference:.1e} apart at most")


_WORK = (("gflop", 1), ("gflop_per_s", 0), ("share_of_products", 2))
_BYTES = ("temporary_bytes", "temporary_deeper_bytes", "state_bytes")


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.step", description=__doc__))
