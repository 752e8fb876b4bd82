"""Attention heads as matrices of their own against whole kernels: `python -m benchmarks.heads`.

Time and temporary memory of one update of Muon+, all in one process, in turn. `--help` lists the
options.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import tyro

import optax_muonplus as omp
from benchmarks import columns, records, timing, trees
from benchmarks.compiled import Update

WHOLE = "whole kernels"


@dataclasses.dataclass(frozen=True)
class Config(trees.Options):
    """The parameters that are updated, and how often."""

    tree: trees.Name = "gpt-small"
    """Shapes of the parameters."""
    head_size: int = 64
    """Outputs of one head, which all of the paper's models of these sizes have."""
    attention_only: bool = False
    """Leave out the updates of all parameters."""
    scanned: bool = False
    """One leaf for a kernel of all layers, with a leading axis, in place of one leaf a layer."""
    rounds: int = 7
    """How often each update is timed."""


def main(config: Config) -> None:
    """Measures and prints the table; writes it with the machine's description as JSON."""
    model = trees.shapes(config.size, dtype=config.dtype)
    model = trees.scanned(model) if config.scanned else model
    parts = {"attention": attention(model)} | ({} if config.attention_only else {"all": model})
    updates = {}
    for part, tree in parts.items():
        grads, params = trees.random_like(tree, 1), trees.random_like(tree, 0)
        for name, numbers in dimension_numbers(config).items():
            print(f"compiling {part}, {name}")
            tx = omp.muonplus(
                0.01, compute_dtype=config.compute_dtype, muon_weight_dimension_numbers=numbers
            )
            updates[part, name] = Update(tx, params, grads)
    seconds = timing.interleaved(updates, config.rounds)
    rows = [
        {
            "parameters": part,
            "update": name,
            **update.figures,
            **timing.median_and_quartiles(seconds[part, name]),
            "of_whole": float(np.median(seconds[part, name] / seconds[part, WHOLE])),
        }
        for (part, name), update in updates.items()
    ]
    print(columns.table(rows, COLUMNS, left=2))
    record = {**records.describe_run("benchmarks.heads", config), "rows": rows}
    form = [*config.changed, *["scanned"] * config.scanned]
    name = "-".join(["heads", config.tree, *form, config.dtype, jax.default_backend()])
    records.write(config.out, name, record)


def attention(tree: dict[str, Any]) -> dict[str, Any]:
    """Picks the kernels of queries, keys, values and outputs."""
    blocks = {name: block for name, block in tree.items() if name.startswith("block")}
    return {name: {kernel: block[kernel] for kernel in "qkvo"} for name, block in blocks.items()}


def dimension_numbers(config: Config) -> dict[str, Any]:
    """Lists what is compared, by name."""
    layer_axes = trees.LAYER_AXES if config.scanned else None
    heads = functools.partial(omp.per_head, config.head_size, layer_axes=layer_axes)
    return {
        WHOLE: functools.partial(omp.muon_dimension_numbers, layer_axes=layer_axes),
        "heads of q, k, v": heads(),
        "heads of q, k, v, o": heads(output=True),
    }


COLUMNS = (
    columns.word("parameters", "parameters"),
    columns.word("update", "update"),
    ("ms (quartiles)", columns.milliseconds),
    columns.number("of whole kernels'", "of_whole", 3),
    columns.number("temporary MB", "temporary_bytes", 1, 1e6),
    columns.number("compile s", "compile_s", 2),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.heads", description=__doc__))
