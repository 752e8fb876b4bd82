"""Attention heads as matrices of their own against whole kernels: `python -m benchmarks.heads`.

Time and temporary memory of one update of Muon+, all in one process, in turn. `--help` lists the
options.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console

import optax_muonplus as omp
from benchmarks import records, step, timing, trees
from examples.trainer.system import tables

WHOLE = "whole kernels"


@dataclasses.dataclass(frozen=True)
class Config:
    """The parameters that are updated, and how often."""

    tree: Literal["gpt-384", "gpt-small", "llama-350m", "llama-1b"] = "gpt-small"
    """Shapes of the parameters."""
    head_size: int = 64
    """Outputs of one head, which all of the paper's models of these sizes have."""
    layers: int | None = None
    """Number of layers, if not the model's own."""
    attention_only: bool = False
    """Leave out the updates of all parameters."""
    scanned: bool = False
    """One leaf for a kernel of all layers, with a leading axis, in place of one leaf a layer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters, gradients and the operands of products."""
    rounds: int = 7
    """How often each update is timed."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Measures and prints the table; writes it with the machine's description as JSON."""
    console = Console(width=max(Console().width, 120))
    size = trees.resized(trees.SIZES[config.tree], config.layers, None)
    model = trees.shapes(size, dtype=config.dtype)
    model = trees.scanned(model) if config.scanned else model
    programs, figures = {}, {}
    parts = {"attention": attention(model)} | ({} if config.attention_only else {"all": model})
    for part, tree in parts.items():
        grads, params = trees.random_like(tree, 1), trees.random_like(tree, 0)
        for name, numbers in dimension_numbers(config).items():
            tx = omp.muonplus(
                0.01,
                compute_dtype=None if config.dtype == "float32" else config.dtype,
                muon_weight_dimension_numbers=numbers,
            )
            console.print(f"compiling {part}, {name}")
            compiled, seconds = step.compile_update(tx, tree)
            memory = compiled.memory_analysis().temp_size_in_bytes
            figures[part, name] = {"compile_s": seconds, "temporary_bytes": memory}
            update = step.CompiledUpdate(
                compiled, grads, tx.init(params), params, figures[part, name]
            )
            programs[part, name] = update.run
    seconds = timing.interleaved(programs, config.rounds, console)
    rows = [
        {"parameters": part, "update": name, **figures[part, name]}
        | of_whole(seconds[part, name], seconds[part, WHOLE])
        for part, name in programs
    ]
    show(console, rows)
    record = {**records.describe_run("benchmarks.heads", config), "rows": rows}
    form = [f"layers{config.layers}"] if config.layers else []
    form += ["scanned"] if config.scanned else []
    name = "-".join(["heads", config.tree, *form, config.dtype, jax.default_backend()])
    records.write(config.out, name, record, console)


def attention(tree: dict[str, Any]) -> dict[str, Any]:
    """The kernels of queries, keys, values and outputs."""
    blocks = {name: block for name, block in tree.items() if name.startswith("block")}
    return {name: {kernel: block[kernel] for kernel in "qkvo"} for name, block in blocks.items()}


def dimension_numbers(config: Config) -> dict[str, Any]:
    """What is compared, by name."""
    layer_axes = trees.LAYER_AXES if config.scanned else None
    return {
        WHOLE: functools.partial(omp.muon_dimension_numbers, layer_axes=layer_axes),
        "heads of q, k, v": omp.per_head(config.head_size, layer_axes=layer_axes),
        "heads of q, k, v, o": omp.per_head(config.head_size, output=True, layer_axes=layer_axes),
    }


def of_whole(seconds: np.ndarray, whole: np.ndarray) -> dict[str, Any]:
    """Median and quartiles, and the ratio to the update of whole kernels in the same round."""
    ratio = float(np.median(seconds / whole))
    return {**timing.median_and_quartiles(seconds), "of_whole": ratio}


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints the table in Markdown, ready for the README."""
    head = [
        "parameters",
        "update",
        "ms (quartiles)",
        "of whole kernels'",
        "temporary MB",
        "compile s",
    ]
    lines = []
    for row in rows:
        low, high = (1e3 * s for s in row["quartiles_s"])
        line = [
            row["parameters"],
            row["update"],
            f"{1e3 * row['median_s']:.1f} ({low:.1f}-{high:.1f})",
            f"{row['of_whole']:.3f}",
            f"{row['temporary_bytes'] / 1e6:.1f}",
            f"{row['compile_s']:.2f}",
        ]
        lines.append(line)
    console.out(tables.markdown(head, lines, left=2))


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.heads", description=__doc__))
