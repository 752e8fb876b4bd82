"""One update, compiled for accelerators that are not there: `python -m benchmarks.accelerators`.

Nothing is run. The compilers are those of the accelerators, and the figures are what they wrote:
of a GPU the bytes and kernels beside the products, of a TPU libtpu's cycles. `--help` lists the
options. A row is a name and words of its form: `omp.muonplus:bfloat16:row_col:matched`.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

import jax
import tyro

from benchmarks import accelerator_row, columns, records, trees
from benchmarks.accelerator_row import REFERENCE
from examples.compiled_programs import child, targets


@dataclasses.dataclass(frozen=True)
class Config(trees.Options):
    """The update and the accelerators that it is compiled for."""

    target: str = "h100:1"
    """`h100:N`, or a kind of TPU and its layout: `v5e:4x4`, `v5p:2x2x1`, `v6e:2x2`, `v5e:1`."""
    tree: trees.Name = "gpt-small"
    """Shapes of the parameters."""
    experts: int = 1
    """Groups of devices that have different experts; rows are cut over the devices of a group."""
    scanned: bool = False
    """One leaf for a kernel of all layers, with a leading axis, in place of one leaf a layer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and gradients, and so of Optax's products."""
    per_head: int | None = None
    """Outputs of one attention head: this package then takes each head of queries, keys and values
    for a matrix. Optax's rows have whole kernels."""
    rows: tuple[str, ...] = (
        REFERENCE,
        "omp.muon:bfloat16",
        "omp.muonplus:bfloat16",
        "omp.muonplus:bfloat16:row_col:matched",
    )
    """Which rows to compile: optax.contrib.muon, optax.adamw, omp.muon and omp.muonplus with words
    of `accelerator_row.WORDS`. Without `default` a row has Optax's momentum and shape factor."""
    row: str | None = None
    """Compile this row in this process and print its figures as JSON. The command starts itself so
    for each row, in the environment that the compiler needs."""


LIMIT_S = 1800.0  # after which a row is given up


def main(config: Config) -> None:
    """Compiles and prints the table; writes it with the machine's description as JSON."""
    try:
        target = targets.parse(config.target)
        for name in config.rows:
            rule, *words = name.split(":")
            accelerator_row.arguments(rule, words)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if sentence := targets.missing(target):
        raise SystemExit(sentence)
    if config.row is not None:
        print(json.dumps(accelerator_row.figures(config.row, config, target)))
        return
    jax.config.update("jax_platforms", "cpu")  # plugins would complain of devices that are missing
    rows: dict[str, Any] = {}
    for name in config.rows:
        print(f"compiling {name}", flush=True)
        rows[name] = row_of_process(command(config, name), target, LIMIT_S)
    print(assumptions(target))
    print(table(target, rows))
    record = {
        **records.describe_run("benchmarks.accelerators", config),
        "compilers": targets.compilers(target),
        "assumptions": assumptions(target),
        "rows": rows,
    }
    records.write(config.out, file_name(config), record)


def command(config: Config, name: str) -> list[str]:
    """Returns the command that compiles one row."""
    options = dataclasses.replace(config, rows=Config.rows, row=name)
    return [sys.executable, "-m", "benchmarks.accelerators", *records.flags(options)]


def row_of_process(arguments: list[str], target: targets.Target, limit_s: float) -> dict[str, Any]:
    """Returns the figures that a process prints; if it fails, how it ended."""
    with child.process(arguments, targets.environment(target), limit_s) as (lines, ended):
        found = list(lines)
        how = ended()
    return {"failed": how} if how else found[-1]


def assumptions(target: targets.Target) -> str:
    """Says what the figures are made of."""
    cycles = "Cycles are libtpu's own estimates, without collectives."
    return (
        "Nothing was run: these are programs of the real compiler, read as text."
        f" {f'Roofline: {target.roofline}' if target.is_gpu else cycles} Loops count as often as"
        " they run, a conditional with the branch that its device takes, or with its most expensive"
        " one. Figures are of the device with most work."
    )


def table(target: targets.Target, rows: Mapping[str, dict[str, Any]]) -> str:
    """Writes the table, and a sentence for each row that has no figures."""
    done = {name: row for name, row in rows.items() if "failed" not in row}
    sums = {
        name: row | {"received_bytes": sum(row["received_bytes"].values())}
        for name, row in done.items()
    }
    shown = [columns.word("update", "name")]
    for heading, key, digits, unit, compared in (_GPU if target.is_gpu else _TPU) + _MEMORY:
        shown.append(columns.number(heading, key, digits, unit))
        if compared:
            shown.append(columns.of_reference(key, sums.get(REFERENCE, {})))
    shown.append(("collectives", collectives))
    failed = [
        f"{name} has no figures: {row['failed']}" for name, row in rows.items() if name not in done
    ]
    return "\n".join([columns.table(columns.named(sums), shown), *failed])


def collectives(row: columns.Row) -> str:
    """Writes how many collectives of each kind run."""
    return ", ".join(f"{n:g} {kind}" for kind, n in row["collectives"].items())


# Heading, key of the figure, digits, its unit, and whether it is compared with Optax's.
_MEMORY = (
    ("state MB", "state_bytes", 1, 1e6, False),
    ("temporary MB", "temporary_bytes", 1, 1e6, True),
    ("MB received", "received_bytes", 1, 1e6, False),
    ("compile s", "compile_s", 1, 1, False),
)
_GPU = (
    ("roofline ms", "roofline_s", 2, 1e-3, True),
    ("GB beside products", "bytes_beside_products", 2, 1e9, True),
    ("kernels beside products", "kernels_beside_products", 0, 1, True),
    ("TFLOP", "operations_of_products", 2, 1e12, True),
    ("kernels", "kernels", 0, 1, False),
)
_TPU = (
    ("million cycles", "estimated_cycles", 1, 1e6, True),
    ("estimated operations", "kernels", 0, 1, True),
)


def file_name(config: Config) -> str:
    """Says what was compiled, for which devices."""
    heads = ["per-head"] if config.per_head else []
    spread = [f"experts{config.experts}"] if config.experts > 1 else []
    form = [*["scanned"] * config.scanned, *config.changed, *heads, *spread]
    parts = ["accelerators", config.target.replace(":", "-"), config.tree, *form, config.dtype]
    return "-".join(parts)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.accelerators", description=__doc__))
