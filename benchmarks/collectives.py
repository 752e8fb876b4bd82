"""What devices send each other in one update: `python -m benchmarks.collectives`.

Programs are compiled for simulated devices and read, never run. `--help` lists the options.
"""

import collections
import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import jax
import optax
import tyro
from rich.console import Console

import optax_muonplus as omp
from benchmarks import meshes, products, records, trees
from examples.compiled_programs import counts, hlo
from examples.compiled_programs.collectives import lowered_bytes
from examples.trainer.system import tables

REFERENCE = "optax.contrib.muon"
COMPILER = "omp.muonplus, left to the compiler"
OURS = "omp.muonplus, sharding="
NARROW = "omp.muonplus, sharding=, bfloat16"


@dataclasses.dataclass(frozen=True)
class Config:
    """The update and the devices that it is compiled for."""

    tree: Literal[
        "gpt-256", "gpt-small", "gpt-base", "gpt-large", "gpt-huge",
        "llama-60m", "llama-130m", "llama-350m", "llama-1b", "llama-7b",
    ] = "gpt-256"  # fmt: skip
    """Shapes of the parameters."""
    mesh: str = "data=4,model=2"
    """Axes of the mesh and how many devices each has."""
    spec: str = "data,model"
    """The mesh axis that cuts the rows of each matrix, then the one that cuts its columns; `-` is
    none. Matrices are replicated along the mesh's other axes: `data` is FSDP, `-` is data
    parallel, and a third axis in the mesh makes replicas of any of these."""
    layers: int | None = None
    """Number of layers, if not the model's own."""
    width: int | None = None
    """Width, if not the model's own; the feed-forward width is scaled with it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and gradients."""
    rivals: bool = True
    """Also compile Optax's Muon, and Muon+ without `sharding=`. Both take long for many layers."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Compiles and prints the table; writes it with the machine's description as JSON."""
    console = Console(width=max(Console().width, 260))  # the table is wide
    size = trees.resized(trees.SIZES[config.tree], config.layers, config.width)
    shapes = trees.shapes(size, dtype=config.dtype)
    placed = meshes.placed(shapes, meshes.simulated(config.mesh), config.spec)
    for line in meshes.described(placed):
        console.print(line)
    rows = {}
    for name, tx in optimizers(config, placed).items():
        console.print(f"compiling {name}")
        rows[name] = figures(tx, placed, method_operations(size, name, config.dtype))
    if not config.rivals:
        console.print(f"{REFERENCE} and {COMPILER} were not compiled: --no-rivals")
    show(console, rows)
    record = {
        **records.describe_run("benchmarks.collectives", config),
        "sharding": meshes.described(placed),
        "rows": rows,
    }
    records.write(config.out, file_name(config), record, console)


def optimizers(config: Config, placed: Any) -> dict[str, optax.GradientTransformation]:
    """The optimizers of the table; all treat the same parameters as matrices."""
    dims = omp.muon_dimension_numbers(placed)
    sharding = jax.tree.map(lambda x: x.sharding, placed)
    given: dict[str, Any] = {"muon_weight_dimension_numbers": dims}
    narrow: dict[str, Any] = {**given, "compute_dtype": "bfloat16"}
    ours = given if config.dtype == "float32" else narrow
    rows = {}
    if config.rivals:
        rows[REFERENCE] = optax.contrib.muon(0.02, **given)
        rows[COMPILER] = omp.muonplus(0.02, **ours)
    rows[OURS] = omp.muonplus(0.02, sharding=sharding, **ours)
    if config.dtype == "float32":
        rows[NARROW] = omp.muonplus(0.02, sharding=sharding, **narrow)
    return rows


def method_operations(size: trees.Size, name: str, dtype: str) -> int:
    """Operations of a row's method for all matrices: plain Newton-Schulz, or Gram in float32."""
    narrow = dtype != "float32" or name == NARROW
    polar = "newton_schulz" if name == REFERENCE else "auto"
    return products.flops(products.needed(size, polar, "bfloat16" if narrow else None))


def lowered_update(tx: optax.GradientTransformation, placed: Any) -> Any:
    """The update before compilation; gradients and state are sharded like the parameters."""
    state = meshes.placed_state(jax.eval_shape(tx.init, placed), placed)
    return jax.jit(tx.update).lower(placed, state, placed)


def figures(tx: optax.GradientTransformation, placed: Any, operations: int) -> dict[str, Any]:
    """One row of the table: counts of the device with the most work, and the least possible."""
    begin = time.perf_counter()
    lowered = lowered_update(tx, placed)
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    program = hlo.read_program(compiled)
    devices = counts.count(program)
    most = max(devices, key=lambda device: (device.operations, device.received.total()))
    fewest = meshes.fewest_bytes(placed)
    return {
        "collectives": dict(most.collectives),
        "collectives_in_loops": most.in_loops,
        "received_bytes": most.received.total(),
        "received_bytes_by_kind": dict(most.received),
        "returned_bytes": most.returned,
        "lowered_bytes": lowered_bytes(lowered.as_text()),
        "fewest_bytes": fewest,
        "received_ratio": most.received.total() / fewest,
        "operations": most.operations,
        "operations_ratio": most.operations * program.devices / operations,
        "operations_of_devices": dict(collections.Counter(device.operations for device in devices)),
        **memory(compiled),
        "compile_s": seconds,
    }


def memory(compiled: Any) -> dict[str, int]:
    """Bytes that one device allocates."""
    analysis = compiled.memory_analysis()
    return {
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
    }


def file_name(config: Config) -> str:
    """Name of the JSON file, from the options that change the figures."""
    mesh = config.mesh.replace("=", "").split(",")
    spec = ["none" if name == "-" else name for name in config.spec.split(",")]
    parts = ["collectives", config.tree, *mesh, "by", *spec]
    parts += [f"{name}{value}" for name in ("width", "layers") if (value := getattr(config, name))]
    return "-".join([*parts, config.dtype])


def show(console: Console, rows: dict[str, Any]) -> None:
    """Prints the table in Markdown, ready for the README."""
    header = [
        "update", "collectives", "in loops", "MB received", "of results", "asked for", "fewest",
        "ratio", "GFLOP", "to total/N", "temporary MB", "in and out MB", "compile s",
    ]  # fmt: skip
    lines = []
    for name, row in rows.items():
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(row["collectives"].items()))
        line = [
            name,
            f"{sum(row['collectives'].values())}: {kinds}" if kinds else "0",
            str(row["collectives_in_loops"]),
            *(f"{row[key] / 1e6:.2f}" for key in ("received_bytes", "returned_bytes")),
            f"{row['lowered_bytes'] / 1e6:.2f}" if row["lowered_bytes"] else "",
            f"{row['fewest_bytes'] / 1e6:.2f}",
            f"{row['received_ratio']:.2f}",
            f"{row['operations'] / 1e9:.2f}",
            f"{row['operations_ratio']:.3f}",
            f"{row['temporary_bytes'] / 1e6:.1f}",
            f"{(row['argument_bytes'] + row['output_bytes']) / 1e6:.1f}",
            f"{row['compile_s']:.1f}",
        ]
        lines.append(line)
    console.out(tables.markdown(header, lines, left=2))


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.collectives", description=__doc__))
