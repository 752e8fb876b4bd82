"""An update compiled for accelerators that are not there: `python -m lab.benchmarks.accelerators`.

Nothing is run. The accelerators' own compilers wrote the figures: for a GPU the bytes and kernels
beside the products, for a TPU libtpu's cycles without collectives. Loops count as often as they
run, and a conditional with its most expensive branch: where devices differ, figures are upper
bounds. `--help` lists the options.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax
import tyro
from jax.sharding import Mesh

import optax_muonplus as omp
from lab.benchmarks import columns, meshes, parity, records, trees
from lab.benchmarks.compiled import Compiled, compile_update
from lab.compiled_programs import child, gpu, hlo, targets, tpu, walk

REFERENCE = "optax.contrib.muon"
OURS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "omp.muon": functools.partial(omp.muon, **parity.AS_OPTAX),
    "omp.muonplus": omp.muonplus,
    "omp.muonplus:col_row": functools.partial(omp.muonplus, **parity.COL_ROW),
    "omp.muonplus:cubic": functools.partial(omp.muonplus, ns_coeffs="cubic"),
}
LIMIT_S = 1800.0  # after which a row is given up


@dataclasses.dataclass(frozen=True)
class Config(trees.Options):
    """The update and the accelerators that it is compiled for."""

    target: str = "h100:1"
    """`h100:N`, or a kind of TPU and its layout: `v5e:4x4`, `v5p:2x2x1`, `v6e:2x2`, `v5e:1`."""
    tree: trees.Name = "gpt-small"
    """Shapes of the parameters."""
    model: trees.Model | None = None
    """A model of AlgoPerf in place of `--tree`, one leaf a kernel."""
    scanned: bool = False
    """One leaf for a kernel of all layers, with a leading axis, in place of one leaf a layer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of parameters and gradients, and so of Optax's products."""
    products: Literal["default", "bfloat16", "float32"] = "default"
    """Dtype of this package's products; on a GPU, XLA rounds operands of float32 to TF32."""
    rows: tuple[str, ...] = (REFERENCE, "omp.muon", "omp.muonplus")
    """Which rows to compile: optax.contrib.muon, omp.muon with Optax's update, omp.muonplus, or
    this with `:col_row` or `:cubic`."""
    row: str | None = None
    """Compile this row in this process and print its figures as JSON. The command starts itself so
    for each row, in the environment that the compiler needs."""


def main(config: Config) -> None:
    """Compiles and prints the table; writes it with the machine's description as JSON."""
    try:
        target = targets.parse(config.target)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if config.model and (config.changed or config.scanned):
        raise SystemExit("--model leaves no choice of --width, --layers and --scanned.")
    if unknown := sorted({*config.rows} - {REFERENCE, *OURS}):
        raise SystemExit(f"There is no row {unknown[0]}: {', '.join((REFERENCE, *OURS))}.")
    if sentence := targets.missing(target):
        raise SystemExit(sentence)
    if config.row is not None:
        print(json.dumps(figures(config.row, config, target)))
        return
    jax.config.update("jax_platforms", "cpu")  # plugins would complain of devices that are missing
    rows: dict[str, Any] = {}
    for name in config.rows:
        print(f"compiling {name}", flush=True)
        rows[name] = row_of_process(name, config, target)
    print(table(target, rows))
    record = records.describe_run("lab.benchmarks.accelerators", config)
    record |= {"compilers": targets.compilers(target), "rows": rows}
    form = [*["scanned"] * config.scanned, *config.changed, config.dtype]
    parts = ["accelerators", config.target.replace(":", "-"), config.model or config.tree, *form]
    records.write(config.out, "-".join(parts), record)


def row_of_process(name: str, config: Config, target: targets.Target) -> dict[str, Any]:
    """Returns the figures that a process prints; if it fails, how it ended."""
    options = dataclasses.replace(config, rows=Config.rows, row=name)
    command = [sys.executable, "-m", "lab.benchmarks.accelerators", *records.flags(options)]
    with child.process(command, targets.environment(target), LIMIT_S) as (lines, ended):
        found = list(lines)
        how = ended()
    return {"failed": how} if how else found[-1]


def figures(name: str, config: Config, target: targets.Target) -> dict[str, Any]:
    """Compiles the update of one row, and reads its program."""
    tree = placed(config, target)
    tx = optimizer(name, config, tree)
    return of_program(compile_update(tx, tree, options=target.compiler_options), target)


def placed(config: Config, target: targets.Target) -> Any:
    """Cuts the rows of matrices over all devices of the target (FSDP)."""
    mesh = Mesh(targets.devices(target), ("data",))
    if config.model:
        return meshes.placed(trees.shapes_of_model(config.model, config.dtype), mesh, "data")
    tree = meshes.placed(trees.shapes(config.size, config.dtype), mesh, "data")
    return trees.scanned(tree) if config.scanned else tree


def optimizer(name: str, config: Config, tree: Any) -> optax.GradientTransformation:
    """Makes the optimizer of a row; all treat the same parameters as matrices."""
    given: dict[str, Any] = {"muon_weight_dimension_numbers": trees.dimension_numbers(tree)}
    if name == REFERENCE:
        return optax.contrib.muon(0.02, **given)
    sharding = jax.tree.map(lambda x: x.sharding, tree)
    if next(iter(jax.tree.leaves(sharding))).mesh.size > 1:
        given["sharding"] = sharding
    dtype = None if config.products == "default" else config.products
    return OURS[name](0.02, compute_dtype=dtype, **given)


def of_program(compiled: Compiled, target: targets.Target) -> dict[str, Any]:
    """Reads a compiled update: what a device does at most, and memory."""
    program = hlo.read_program(compiled.program)
    work = gpu.most_work(program) if target.is_gpu else tpu.most_work(program)
    size, kernels = walk.of_kinds(work, "bytes"), walk.of_kinds(work, "kernels")
    return {
        "kernels": sum(kernels.values()),
        "kernels_by_kind": kernels,
        "kernels_beside_products": sum(kernels.values()) - kernels.get("products", 0),
        "bytes_beside_products": sum(size.values()) - size.get("products", 0),
        "bytes_by_kind": size,
        "operations": walk.total(work, "operations"),
        "estimated_cycles": walk.total(work, "cycles"),
        "collectives": walk.of_kinds(work, "collectives"),
        "received_bytes": walk.total(work, "received"),
        **compiled.figures(),
    }


def table(target: targets.Target, rows: Mapping[str, dict[str, Any]]) -> str:
    """Writes the table, and a sentence for each row that has no figures."""
    done = {name: row for name, row in rows.items() if "failed" not in row}
    shown = [columns.word("update", "name")]
    for heading, key, digits, unit, compared in (_GPU if target.is_gpu else _TPU) + _MEMORY:
        shown.append(columns.number(heading, key, digits, unit))
        if compared:
            shown.append(columns.of_reference(key, done.get(REFERENCE, {})))
    shown.append(columns.counts("collectives", "collectives"))
    failed = [f"{name} has no figures: {row['failed']}" for name, row in rows.items()
              if name not in done]  # fmt: skip
    return "\n".join([columns.table(columns.named(done), shown), *failed])


# Heading, key of the figure, digits, its unit, and whether it is compared with Optax's.
_MEMORY = (
    ("TFLOP at most", "operations", 2, 1e12, True),
    ("temporary MB", "temporary_bytes", 1, 1e6, True),
    ("MB received", "received_bytes", 1, 1e6, False),
    ("compile s", "compile_s", 1, 1, False),
)
_GPU = (
    ("GB beside products", "bytes_beside_products", 2, 1e9, True),
    ("kernels beside products", "kernels_beside_products", 0, 1, True),
    ("kernels", "kernels", 0, 1, False),
)
_TPU = (
    ("million cycles", "estimated_cycles", 1, 1e6, True),
    ("estimated operations", "kernels", 0, 1, True),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m lab.benchmarks.accelerators", description=__doc__))
