"""What devices send each other in one update: `python -m lab.benchmarks.collectives`.

Programs are compiled for simulated devices and read, never run. Where devices differ, GFLOP is an
upper bound. `--help` lists the options.
"""

import dataclasses
import functools
from typing import Any

import jax
import optax
import tyro

import optax_muonplus as omp
from lab.benchmarks import columns, meshes, records, trees
from lab.benchmarks.compiled import compile_update
from lab.compiled_programs import hlo, products, walk

REFERENCE = "optax.contrib.muon"
COMPILER = "omp.muonplus, left to the compiler"
OURS = "omp.muonplus, sharding="
NARROW = "omp.muonplus, sharding=, bfloat16"
CUT_STATE = "omp.muonplus, sharding=, state_sharding="


@dataclasses.dataclass(frozen=True)
class Config(trees.Options):
    """The update and the devices that it is compiled for."""

    tree: trees.Name = "gpt-256"
    """Shapes of the parameters."""
    mesh: str = "data=4,model=2"
    """Axes of the mesh and how many devices each has."""
    spec: str = "data,model"
    """The mesh axis that cuts the rows of each matrix, then the one that cuts its columns; `-` is
    none. Matrices are replicated along the mesh's other axes: `data` is FSDP, `-` is data
    parallel, and a third axis in the mesh makes replicas of any of these."""
    scanned: bool = False
    """One leaf for a kernel of all layers, with a leading axis, in place of one leaf a layer."""
    state_over: str = ""
    """A mesh axis of replicas; adds a row with the state sharded over it."""
    rivals: bool = True
    """Also compile Optax's Muon, and Muon+ without `sharding=`. Both take long for many layers."""


def main(config: Config) -> None:
    """Compiles and prints the table; writes it with the machine's description as JSON."""
    shapes = trees.shapes(config.size, config.dtype)
    devices = meshes.simulated(config.mesh)
    if devices.size == 1:
        raise SystemExit(f"--mesh {config.mesh} is one device, on which nothing moves.")
    placed = meshes.placed(shapes, devices, config.spec)
    placed = trees.scanned(placed) if config.scanned else placed
    sharding = meshes.described(placed)
    print(*sharding, sep="\n")
    rows = {}
    for name, tx in optimizers(config, placed).items():
        print(f"compiling {name}")
        rows[name] = figures(tx, placed, cut_state(config, placed) if name == CUT_STATE else placed)
    print(columns.table(columns.named(rows), COLUMNS, left=2))
    record = records.describe_run("lab.benchmarks.collectives", config)
    mesh = config.mesh.replace("=", "").split(",")
    spec = ["none" if name == "-" else name for name in config.spec.split(",")]
    form = ["scanned"] * config.scanned + [f"state-over-{config.state_over}"] * bool(
        config.state_over
    )
    parts = ["collectives", config.tree, *mesh, "by", *spec, *form, *config.changed, config.dtype]
    records.write(config.out, "-".join(parts), {**record, "sharding": sharding, "rows": rows})


def optimizers(config: Config, placed: Any) -> dict[str, optax.GradientTransformation]:
    """Makes the optimizers of the table; all treat the same parameters as matrices."""
    sharding = jax.tree.map(lambda x: x.sharding, placed)
    given: dict[str, Any] = {"muon_weight_dimension_numbers": trees.dimension_numbers(placed)}
    narrow: dict[str, Any] = {**given, "compute_dtype": "bfloat16"}
    ours = given if config.dtype == "float32" else narrow
    rows = {}
    if config.rivals:
        rows[REFERENCE] = optax.contrib.muon(0.02, **given)
        rows[COMPILER] = omp.muonplus(0.02, **ours)
    rows[OURS] = omp.muonplus(0.02, sharding=sharding, **ours)
    if config.dtype == "float32":
        rows[NARROW] = omp.muonplus(0.02, sharding=sharding, **narrow)
    if config.state_over:
        over = config.state_over
        rows[CUT_STATE] = omp.muonplus(0.02, sharding=sharding, state_sharding=over, **ours)
    return rows


def cut_state(config: Config, placed: Any) -> Any:
    """Shapes that are sharded as a state over ``config.state_over`` is."""
    sharding = jax.tree.map(lambda x: x.sharding, placed)
    shardings = omp.transforms.state_layout(sharding, config.state_over)(placed)
    return jax.tree.map(lambda x, s: x.update(sharding=s), placed, shardings)


def figures(tx: optax.GradientTransformation, placed: Any, state_like: Any) -> dict[str, Any]:
    """Counts one row of the table: what a device does at most, and the least possible."""
    compiled = compile_update(tx, placed, state_like=state_like)
    program = hlo.read_program(compiled.program)
    work = walk.most_work(program, functools.partial(products.cost, program), "operations")
    received, fewest = walk.total(work, "received"), meshes.fewest_bytes(placed)
    return {
        "collectives": walk.of_kinds(work, "collectives"),
        "received_bytes": received,
        "received_bytes_by_kind": walk.of_kinds(work, "received"),
        "fewest_bytes": fewest,
        "received_ratio": received / fewest,
        "operations": walk.total(work, "operations"),
        **compiled.figures(),
    }


COLUMNS = (
    columns.word("update", "name"),
    columns.counts("collectives", "collectives"),
    columns.number("MB received", "received_bytes", 2, 1e6),
    columns.number("fewest", "fewest_bytes", 2, 1e6),
    columns.number("ratio", "received_ratio", 2),
    columns.number("GFLOP at most", "operations", 2, 1e9),
    columns.number("temporary MB", "temporary_bytes", 1, 1e6),
    columns.number("compile s", "compile_s"),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m lab.benchmarks.collectives", description=__doc__))
