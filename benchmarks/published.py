"""Times that others measured, and what compiled programs say of the same matrices.

`python -m benchmarks.published` compiles each update with the compiler of the measured device,
which need not be there, and prints the roofline beside the published time. Nothing is run. README
says which shapes a source states, and which were assumed.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optax_muonplus as omp
from benchmarks import accelerator_row, accelerators, columns, records
from benchmarks.compiled import compile_update
from examples.compiled_programs import targets
from examples.trainer.settings.presets import SIZES

Shapes = dict[str, tuple[int, ...]]
LIMIT_S = 1800.0


class Case(NamedTuple):
    """A published time.

    Attributes:
      source: repository and thread, or paper.
      measured_s: seconds of one update.
      target: as in `benchmarks.accelerators`.
      layer: shapes (out, in) of the matrices of a layer, or (experts, out, in).
      layers: how many.
      rule: what is done with them.
      steps: of the iteration.
      polar: its form.
      coefficients: its table.
      compute_dtype: of products.
      memory: bytes a second, of a device that the compiler's target only stands for.
      times: the measured update has so many times these layers, which is compiled sooner.
    """

    source: str
    measured_s: float
    target: str
    layer: Shapes
    layers: int = 1
    rule: str = "muon"
    steps: int = 5
    polar: omp.polar.Polar = "newton_schulz"
    coefficients: str = "jordan"
    compute_dtype: str | None = "bfloat16"
    memory: float | None = None
    times: int = 1


def llama(name: str) -> Shapes:
    """Returns the matrices of a layer of a LLaMA of the paper."""
    d, f = SIZES[name].d_model, SIZES[name].d_ff
    return {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d)} | {
        "gate": (f, d), "up": (f, d), "down": (d, f)
    }  # fmt: skip


EXPERTS: Shapes = {"experts_up": (256, 2560, 2560), "experts_down": (256, 1280, 2560)}
GRUG: Shapes = EXPERTS | {
    "q": (2560, 2560), "k": (640, 2560), "v": (640, 2560), "o": (2560, 2560),
    "shared_up": (5120, 2560), "shared_down": (2560, 2560),
}  # fmt: skip
MARIN = "marin #6493"
DION3 = "arXiv:2608.11612"
GRAM = "DeepSpeed 381d8b7"
CASES = {
    "24 of 1024 x 4096, 5 steps": Case(
        "pocket-tts #314", 8.3e-3, "h100:1", {"up": (1024, 4096)}, 24, "polar factor"
    ),
    "24 of 1024 x 4096, 6 steps of Polar Express": Case(
        "pocket-tts #314", 7.1e-3, "h100:1", {"up": (1024, 4096)}, 24, "polar factor", 6,
        coefficients="polar_express",
    ),
    "column and row norms, 2048 x 5120": Case(
        "dormouse-fused", 0.68e-3, "a100:1", {"up": (2048, 5120)}, 1, "norms",
        compute_dtype=None, memory=0.9 * 936e9,
    ),
    "MuonH, 26 layers of 256 experts, 3 steps": Case(
        MARIN, 0.6171, "h100:8", GRUG, 2, "muonh", 3, times=13
    ),
    "its experts alone, 3 steps": Case(MARIN, 0.5236, "h100:8", EXPERTS, 2, "muonh", 3, times=13),
    "MuonH, 2 of these layers, 5 steps": Case(MARIN, 0.0832, "h100:8", GRUG, 2, "muonh"),
    "its experts alone, 5 steps": Case(MARIN, 0.0665, "h100:8", EXPERTS, 2, "muonh"),
    "a model of 7B": Case(DION3, 0.3606, "h100:4", llama("llama-7b"), 4, times=8),
    "a model of 7B, Gram": Case(
        DION3, 0.2966, "h100:4", llama("llama-7b"), 4, polar="gram", compute_dtype="float16",
        times=8,
    ),
    "a model of 1.06B, Gram": Case(
        "dion #70", 0.058 * 0.452, "b200:8", llama("llama-1b"), 8, polar="gram",
        coefficients="polar_express", compute_dtype="float16", times=3,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compiled."""

    cases: tuple[str, ...] = tuple(CASES)
    """Names of rows of the table."""
    case: str | None = None
    """Compile this one in this process and print its figures as JSON."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Compiles all cases, each in its own process, and prints the table."""
    if config.case is not None:
        print(json.dumps(figures(CASES[config.case])))
        return
    wanted = {targets.parse(CASES[name].target) for name in config.cases}
    if sentence := next(filter(None, map(targets.missing, wanted)), None):
        raise SystemExit(sentence)
    jax.config.update("jax_platforms", "cpu")
    rows = {}
    for name in config.cases:
        print(f"compiling {name}")
        command = [sys.executable, "-m", "benchmarks.published", "--case", name]
        target = targets.parse(CASES[name].target)
        row = accelerators.row_of_process(command, target, LIMIT_S)
        rows[name] = CASES[name]._asdict() | row
    print(columns.table(columns.named(rows), COLUMNS, left=3))
    record = records.describe_run("benchmarks.published", config)
    records.write(config.out, "published", record | {"rows": rows})


def figures(case: Case) -> dict[str, Any]:
    """Compiles a case and reads its program."""
    target = targets.parse(case.target)
    tree = placed(case, target)
    compiled = compile_update(rule(case, tree), tree, options=target.compiler_options)
    found = accelerator_row.of_program(compiled, target)
    seconds = found["roofline_s"]
    if case.memory:  # of a program without products
        seconds *= target.rates.memory / case.memory
    return found | {"predicted_s": case.times * seconds}


def placed(case: Case, target: targets.Target) -> dict[str, jax.ShapeDtypeStruct]:
    """Makes the leaves, each cut over all devices along its first axis that they divide."""
    mesh = Mesh(targets.devices(target), ("data",))
    dtype = jnp.bfloat16 if case.compute_dtype else jnp.float32

    def leaf(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        axis = next(i for i, side in enumerate(shape) if side % target.devices == 0)
        place = NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    layers = range(case.layers)
    return {f"{name}_{i}": leaf(shape) for i in layers for name, shape in case.layer.items()}


def rule(case: Case, tree: dict[str, jax.ShapeDtypeStruct]) -> Any:
    """Makes the update of a case."""
    numbers = jax.tree.map(lambda x: omp.MuonDimensionNumbers(x.ndim - 1, x.ndim - 2), tree)
    where: dict[str, Any] = {}
    if next(iter(tree.values())).sharding.mesh.size > 1:
        where["sharding"] = jax.tree.map(lambda x: x.sharding, tree)
    factor: dict[str, Any] = {
        "ns_coeffs": case.coefficients, "ns_steps": case.steps, "polar": case.polar,
        "compute_dtype": case.compute_dtype,
    }  # fmt: skip
    if case.rule == "muon":
        return omp.muon(0.02, muon_weight_dimension_numbers=numbers, **factor, **where)
    where = {"where": omp.Matrices(dimension_numbers=numbers, **where)}
    if case.rule == "muonh":
        rule = omp.contrib.scale_by_muon(polar_factor=omp.polar.Orthogonalize(**factor))
        return omp.contrib.hyperball(0.02, rule, **where)
    link = omp.matrices.Normalize() if case.rule == "norms" else omp.polar.Orthogonalize(**factor)
    return omp.matrix_chain(link, **where)


def devices(row: columns.Row) -> str:
    """Writes the number and the kind of devices."""
    kind, _, n = row["target"].partition(":")
    return f"{n} {kind.upper()}"


def ratio(row: columns.Row) -> str:
    """Writes the predicted time over the measured one."""
    return f"{row['predicted_s'] / row['measured_s']:.2f}" if "predicted_s" in row else ""


def of_peak(row: columns.Row) -> str:
    """Writes the rate of the products over the whole measured time, as a share of the peak."""
    if not row.get("operations_of_products"):
        return ""
    done = row["times"] * row["operations_of_products"] / row["measured_s"]
    return f"{done / targets.parse(row['target']).rates.peak:.2f}"


COLUMNS = (
    columns.word("update", "name"),
    columns.word("source", "source"),
    ("devices", devices),
    columns.number("measured ms", "measured_s", 2, 1e-3),
    columns.number("predicted ms", "predicted_s", 2, 1e-3),
    ("predicted / measured", ratio),
    ("of peak, measured", of_peak),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.published", description=__doc__))
