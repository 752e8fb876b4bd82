"""Time, memory and compile time of one update: `python -m benchmarks.step`, `--help` for more."""

import collections
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import optax_muonplus as omp
from benchmarks import machine, trees
from optax_muonplus import coefficients
from optax_muonplus.matrices import Norm
from optax_muonplus.matrices import _batching as grouping
from optax_muonplus.polar import _newton_schulz as newton_schulz

REFERENCE = "optax.contrib.muon"
SAME_UPDATE = "omp.muon, Optax's update"
MUON = "omp.muon"
DEEPER = 4  # times as many layers, to see what grows with them


@dataclasses.dataclass(frozen=True)
class Config:
    """Which update is measured, and how often."""

    tree: Literal["gpt-384", "gpt-small", "llama-350m", "llama-1b"] = "gpt-384"
    """Shapes of the parameters."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and gradients, and of the operands of products, for Optax and for us."""
    vocabulary: int = 0
    """Rows of an embedding, which AdamW updates in every row of the table; 0 is none."""
    rounds: int = 15
    """How often each update is timed."""
    layers: int | None = None
    """Number of layers, if not the model's own."""
    width: int | None = None
    """Width, if not the model's own; the feed-forward width goes with it."""
    out: Path = Path("benchmarks/results")
    """Folder for the JSON file."""


def optimizers(config: Config, dimension_numbers: Any) -> dict[str, optax.GradientTransformation]:
    """The rows of the table. All treat the same parameters as matrices."""
    dims: dict[str, Any] = {"muon_weight_dimension_numbers": dimension_numbers}
    ours: dict[str, Any] = {
        **dims,
        "compute_dtype": None if config.dtype == "float32" else config.dtype,
    }
    as_optax: dict[str, Any] = {
        **ours,
        "shape_scale": "max",
        "nesterov": True,
        "bias_correction": True,
    }
    norms: tuple[Norm, ...] = ("col", "row", "col_row", "row_col")
    return {
        "optax.adamw": optax.adamw(0.01),
        REFERENCE: optax.contrib.muon(0.01, **dims),
        SAME_UPDATE: omp.muon(0.01, **as_optax),
        MUON: omp.muon(0.01, **ours),
        "omp.muon, newton_schulz": omp.muon(0.01, polar="newton_schulz", **ours),
        **{f"omp.muonplus, {norm}": omp.muonplus(0.01, norm=norm, **ours) for norm in norms},
    }


def main(config: Config) -> None:
    """Measures, prints the table and writes it with the machine's description as JSON."""
    console = Console(width=max(Console().width, 180))  # the table is wide
    size = trees.resized(trees.SIZES[config.tree], config.layers, config.width)
    shapes = trees.shapes(size, config.vocabulary, config.dtype)
    dims = omp.muon_dimension_numbers(shapes)
    more_layers = size._replace(layers=DEEPER * size.layers)
    deeper = trees.shapes(more_layers, config.vocabulary, config.dtype)
    params, grads = trees.random_like(shapes, 0), trees.random_like(shapes, 1)

    rows, programs, updates = {}, {}, {}
    deep = optimizers(config, omp.muon_dimension_numbers(deeper))
    for name, tx in optimizers(config, dims).items():
        console.print(f"compiling {name}")
        compiled, seconds = compile_update(tx, shapes)
        more, more_seconds = compile_update(deep[name], deeper)
        state = jax.jit(tx.init)(params)
        rows[name] = {
            "compile_s": seconds,
            "compile_deeper_s": more_seconds,
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "temporary_deeper_bytes": more.memory_analysis().temp_size_in_bytes,
            "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        }
        programs[name] = functools.partial(compiled, grads, state, params)
        if name in (REFERENCE, SAME_UPDATE):
            updates[name] = programs[name]()[0]
    chains = product_chains(size, config.dtype)
    programs |= {name: chain for name, (chain, _) in chains.items()}
    seconds = machine.interleaved(programs, config.rounds, console)
    per_product = product_seconds(chains, seconds)
    for name, row in rows.items():
        row |= timings(seconds[name], seconds[REFERENCE], seconds[MUON])
        if name != "optax.adamw":
            gram = name not in (REFERENCE, "omp.muon, newton_schulz")
            row |= work(size, config.dtype, gram, per_product, row["median_s"])
    result = {
        "command": "python -m benchmarks.step " + " ".join(flags(config)),
        "machine": machine.describe(),
        "config": {**dataclasses.asdict(config), "out": str(config.out)},
        "largest_difference": largest_difference(
            updates[SAME_UPDATE], updates[REFERENCE], omp.partition_labels(shapes)
        ),
        "products": {
            "x".join(map(str, shape)): {"gflop_per_s": 2 * math.prod(shape) / s / 1e9}
            for shape, s in per_product.items()
        },
        "rows": rows,
    }
    show(console, result)
    config.out.mkdir(parents=True, exist_ok=True)
    changed = [f"{name}{value}" for name in ("width", "layers") if (value := getattr(config, name))]
    parts = ["step", config.tree, *changed, config.dtype, jax.default_backend()]
    path = config.out / f"{'-'.join(parts)}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {path}")


def compile_update(tx: optax.GradientTransformation, shapes: Any) -> tuple[Any, float]:
    """The compiled update and the seconds from the call to the program, without any cache."""
    state = jax.eval_shape(tx.init, shapes)
    begin = time.perf_counter()
    compiled = jax.jit(tx.update).lower(shapes, state, shapes).compile()
    return compiled, time.perf_counter() - begin


Chain = tuple[Callable[[], jax.Array], dict[tuple[int, int, int], int]]


def product_chains(size: trees.Size, dtype: str) -> dict[str, Chain]:
    """Programs of products alone, in the sizes that the update has, stacked as it stacks them."""
    chains = {}
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for shape, count in matrices(size):
        counts[min(shape), max(shape)] += count
    for (n, m), count in counts.items():
        batch = 1
        if jax.default_backend() != "cpu":
            batch = max(1, min(count, grouping.STACK_BYTES // (4 * n * m)))
        chains[f"product {n} {m}"] = machine.product_chain(n, m, dtype, batch)
    return chains


def product_seconds(
    chains: dict[str, Chain], seconds: dict[str, np.ndarray]
) -> dict[tuple[int, int, int], float]:
    """Seconds of each product; the two of a pair do the same number of operations."""
    return {
        shape: float(np.median(seconds[name])) / sum(done.values())
        for name, (_, done) in chains.items()
        for shape in done
    }


def matrices(size: trees.Size) -> list[tuple[tuple[int, int], int]]:
    """Each shape of matrices and how many there are."""
    views = [leaf.shape for leaf in jax.tree.leaves(trees.shapes(size)) if len(leaf.shape) == 2]
    return list(collections.Counter(views).items())


def timings(seconds: np.ndarray, reference: np.ndarray, muon: np.ndarray) -> dict[str, Any]:
    """Median, spread and ratios; ratios are taken within each round."""
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return {
        "median_s": float(median),
        "quartiles_s": [float(low), float(high)],
        "times_faster": float(np.median(reference / seconds)),
        "percent_over_muon": 100 * float(np.median(seconds / muon) - 1),
    }


def work(
    size: trees.Size,
    dtype: str,
    gram: bool,
    per_product: dict[tuple[int, int, int], float],
    seconds: float,
) -> dict[str, float]:
    """Operations that the method needs, and the share of ``seconds`` that its products alone take.

    Five steps of the default coefficients. Gram where ``polar="auto"`` chooses it here.
    """
    gram = gram and dtype == "float32" and jax.default_backend() == "cpu"
    operations, floor = 0, 0.0
    for shape, count in matrices(size):
        rows, cuts = method(shape, gram)
        operations += count * newton_schulz.operations(shape, rows, cuts)
        products = newton_schulz.product_shapes(shape, rows, cuts)
        floor += count * sum(per_product[product] for product in products)
    return {
        "gflop": operations / 1e9,
        "gflop_per_s": operations / seconds / 1e9,
        "share_of_products": floor / seconds,
    }


def method(
    shape: tuple[int, int], gram: bool
) -> tuple[tuple[coefficients.Row, ...], tuple[int, ...]]:
    """The default's five rows of coefficients and where to restart: plainly, or at least cost."""
    rows, _, _, restarts, _ = coefficients.resolve("jordan", 5)
    assert restarts is not None  # the number of steps is a plain one
    plain = newton_schulz.every_step(rows)
    choices = [plain, restarts] if gram else [plain]
    return rows, min(choices, key=lambda cuts: newton_schulz.operations(shape, rows, cuts))


def largest_difference(ours: Any, theirs: Any, labels: Any) -> float:
    """Largest relative distance between two updates of one matrix."""

    def norm(x: jax.Array) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float32)))

    leaves = (jax.tree.leaves(tree) for tree in (ours, theirs, labels))
    return max(
        norm(a - b) / norm(b) for a, b, label in zip(*leaves, strict=True) if label == "muon"
    )


def flags(config: Any) -> list[str]:
    """The command line that gives ``config``."""
    default = type(config)()
    changed = {
        field.name.replace("_", "-"): getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name) and field.name != "out"
    }
    return [
        f"--no-{name}" if value is False else f"--{name} {value}" for name, value in changed.items()
    ]


def show(console: Console, result: dict[str, Any]) -> None:
    """The table, in Markdown, so that it can be pasted into the README."""
    header = [
        "update", "ms (quartiles)", "times faster", "over omp.muon",
        "GFLOP", "GFLOP/s", "of products", "compile s",
        f"{DEEPER}x layers", "temporary MB", f"{DEEPER}x layers", "state MB",
    ]  # fmt: skip
    table = Table(box=box.MARKDOWN)
    for column in header:
        table.add_column(column, justify="left" if column == "update" else "right", no_wrap=True)
    for name, row in result["rows"].items():
        low, high = (1e3 * s for s in row["quartiles_s"])
        products = [f"{row[k]:.{d}f}" if k in row else "" for k, d in _WORK]
        table.add_row(
            name,
            f"{1e3 * row['median_s']:.1f} ({low:.1f}-{high:.1f})",
            f"{row['times_faster']:.2f}",
            f"{row['percent_over_muon']:+.1f}%" if "muonplus" in name else "",
            *products,
            f"{row['compile_s']:.2f}",
            f"{row['compile_deeper_s']:.2f}",
            *(f"{row[k] / 1e6:.1f}" for k in _BYTES),
        )
    console.print(table)
    for products, rate in result["products"].items():
        console.print(f"products alone, {products}: {rate['gflop_per_s']:.0f} GFLOP/s")
    difference = result["largest_difference"]
    console.print(f"matrices of {SAME_UPDATE} against {REFERENCE}: {difference:.1e} apart at most")


_WORK = (("gflop", 1), ("gflop_per_s", 0), ("share_of_products", 2))
_BYTES = ("temporary_bytes", "temporary_deeper_bytes", "state_bytes")


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.step", description=__doc__))
