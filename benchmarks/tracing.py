"""CPU time that tracing, lowering and compiling one update take: `python -m benchmarks.tracing`.

Every stage starts without what JAX has cached: `jax.clear_caches()` comes before each trace, the
traced function is a new object, and the persistent compilation cache is off. Times are CPU seconds
of the process, all threads together: other programs on the machine disturb them less than the
clock's. `--against CHECKOUT` measures another version of the library too, and prints the ratios.
`--help` lists the options.
"""

import dataclasses
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks import meshes, records, trees
from examples.trainer.system import tables

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("trace", "lower", "compile")
NAME = "tracing-cpu"  # the JSON file's, without its suffix

# For each update the CPU seconds of each stage, one for each round.
Seconds = dict[str, dict[str, list[float]]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The version that is measured, and how often."""

    rounds: int = 5
    """How often each update is traced, lowered and compiled; one more round is not counted."""
    layers: int | None = None
    """Number of layers, if not 6 on one device and 12 on the mesh."""
    width: int = 384
    """Width of the model."""
    rivals: bool = True
    """Also measure Optax's Muon."""
    library: Path | None = None
    """Checkout whose library is measured in place of this one's."""
    against: Path | None = None
    """Checkout to compare with. Each round then has one process for each version."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


class Case(NamedTuple):
    """An update: what makes the optimizer, and the shapes of the parameters."""

    make: Callable[[], optax.GradientTransformation]
    shapes: Any


def main(config: Config) -> None:
    """Measures and prints the table; writes it with the machine's description as JSON."""
    if config.against is None:
        seconds, other = measure(cases(config), config.rounds), {}
    else:
        seconds, other = compare(config, config.against)
    print(table(seconds, other))
    record = records.describe_run("benchmarks.tracing", config) | {"seconds": seconds}
    records.write(config.out, NAME, record | ({"seconds_against": other} if other else {}))


def cases(config: Config) -> dict[str, Case]:
    """Makes the rows of the table, for the version of the library that ``config`` names."""
    mesh = meshes.simulated("data=4,model=2")  # first, as it sets the number of devices
    if config.library is not None:
        sys.path.insert(0, str(config.library.resolve()))
    import optax_muonplus as omp  # here, so that it comes from the path set above

    if config.library is not None and config.library.resolve() not in Path(omp.__file__).parents:
        raise ValueError(f"{config.library} has no optax_muonplus, or another is imported already")

    size = trees.Options(layers=config.layers, width=config.width).size
    deep = size._replace(layers=config.layers or 12)
    kernel = jax.ShapeDtypeStruct((config.width, 4 * config.width), np.float32)
    two = {"kernel": kernel, "bias": jax.ShapeDtypeStruct((4 * config.width,), np.float32)}
    on_one_device = {"two leaves": two, f"{size.layers} layers": trees.shapes(size)}
    result = {}
    for name, shapes in on_one_device.items():
        given = {"muon_weight_dimension_numbers": omp.muon_dimension_numbers(shapes)}
        if config.rivals:
            optax_muon = Case(lambda given=given: optax.contrib.muon(0.02, **given), shapes)
            result[f"optax.contrib.muon, {name}"] = optax_muon
        muonplus = Case(lambda given=given: omp.muonplus(0.02, **given), shapes)
        result[f"omp.muonplus, {name}"] = muonplus
    four = {
        f"matrix_{rows}_{columns}": {"kernel": jax.ShapeDtypeStruct((rows, columns), jnp.float32)}
        for rows, columns in ((64, 64), (64, 256), (256, 64), (64, 128))
    }
    for dtype in (None, "bfloat16"):
        make = functools.partial(omp.muonplus, 0.02, compute_dtype=dtype)
        result[f"omp.muonplus, four matrices, {dtype or 'float32'}"] = Case(make, four)
    placed = meshes.placed(trees.shapes(deep), mesh, "data,model")
    sharded = {
        "muon_weight_dimension_numbers": omp.muon_dimension_numbers(placed),
        "sharding": jax.tree.map(lambda x: x.sharding, placed),
    }
    name = f"omp.muonplus, {deep.layers} layers, sharding= for 4 x 2 devices"
    return result | {name: Case(lambda: omp.muonplus(0.02, **sharded), placed)}


def measure(cases: Mapping[str, Case], rounds: int) -> Seconds:
    """Measures each stage, for all cases in turn, round after round."""
    seconds: Seconds = {name: {stage: [] for stage in STAGES} for name in cases}
    for turn in track(range(rounds + 1), "rounds", console=Console(stderr=True)):
        for name, case in cases.items():
            for stage, value in time_stages(case).items():
                if turn > 0:  # the first round imports modules and fills tables
                    seconds[name][stage].append(value)
    return seconds


def time_stages(case: Case) -> dict[str, float]:
    """Measures the CPU seconds that each stage takes once."""
    tx = case.make()
    state = meshes.placed_state(jax.eval_shape(tx.init, case.shapes), case.shapes)
    jax.clear_caches()
    gc.collect()
    times = [time.process_time()]
    traced = jax.jit(lambda *args: tx.update(*args)).trace(case.shapes, state, case.shapes)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    lowered.compile()
    times.append(time.process_time())
    return dict(zip(STAGES, np.diff(times).tolist(), strict=True))


def compare(config: Config, against: Path) -> tuple[Seconds, Seconds]:
    """Measures this version and the other in turn, without Optax's Muon."""
    options = ["--rounds", "1", "--width", str(config.width), "--no-rivals"]
    options += ["--layers", str(config.layers)] if config.layers else []
    results: tuple[Seconds, Seconds] = ({}, {})
    for _ in track(range(config.rounds), "rounds", console=Console(stderr=True)):
        for result, library in zip(results, (config.library or ROOT, against), strict=True):
            one = measure_in_process([*options, "--library", str(library.resolve())])
            for name, stages in one.items():
                for stage, values in stages.items():
                    result.setdefault(name, {}).setdefault(stage, []).extend(values)
    return results


def measure_in_process(options: list[str]) -> Seconds:
    """Runs this command in a new process, for the seconds that it measures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.tracing", *options, "--out", folder]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / f"{NAME}.json").read_text())["seconds"]


def table(seconds: Seconds, other: Seconds) -> str:
    """Writes medians, and how many times faster this version is than the other."""
    head = ["update", *(f"{stage} ms" for stage in STAGES)]
    head += [f"{stage}, times faster" for stage in STAGES if other]
    lines = []
    for name, stages in seconds.items():
        row = [f"{1e3 * np.median(stages[stage]):.1f}" for stage in STAGES]
        if other:
            ratios = (np.divide(other[name][stage], stages[stage]) for stage in STAGES)
            row += [f"{np.median(ratio):.2f}" for ratio in ratios]
        lines.append([name, *row])
    return tables.markdown(head, lines)


if __name__ == "__main__":
    # Before the first compilation: JAX ignores it afterwards.
    jax.config.update("jax_enable_compilation_cache", False)
    main(tyro.cli(Config, prog="python -m benchmarks.tracing", description=__doc__))
