"""What a machine with one GPU can tell: `python -m benchmarks.gpu`, `--help` for more.

Polar factors against float64 and against the CPU, whole updates against the CPU and Optax, then
their time and memory, and a step of the trainer. A step that fails or comes after the budget says
so, and the others run; the JSON file is written after each. `--toy` shows on any machine that all
steps run.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import optax_muonplus as omp
from benchmarks import (
    columns,
    gpu_numbers,
    parity,
    products,
    records,
    timing,
    training_step,
    trees,
)
from benchmarks.compiled import Update
from benchmarks.gpu_numbers import METHODS, Figures, Method, guarded
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.presets import PRESETS
from examples.trainer.settings.run import RunConfig

TINY = trees.Size(16, 1, 40, gated=False)
REFERENCE = "optax.contrib.muon"


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured."""

    models: tuple[str, ...] = ("gpt-small", "llama-350m", "llama-1b")
    """Shapes of the parameters of whole updates."""
    matrix: tuple[int, int] = (1024, 2735)
    """Shape of the matrices whose polar factors are checked; an odd side is padded in half
    precision."""
    kernel: bool = False
    """Also check and time the experimental kernel for symmetric products."""
    toy: bool = False
    """Tiny sizes, for any machine."""
    rounds: int = 7
    """How often updates are timed, in turn."""
    calls: int = 10
    """Updates that are enqueued before the last is waited for."""
    budget_s: float = 540.0
    """Seconds after which no step is begun."""
    out: Path = Path("results/benchmarks")
    """Folder for the JSON file."""


TOYS = ("bfloat16, newton_schulz", "float32, gram")
TIMED = ("bfloat16", "float16", "TF32", "float32")


def main(config: Config) -> dict[str, Any]:
    """Runs all steps and returns the record, which is written after each."""
    done: dict[str, Figures] = {}
    record = records.describe_run("benchmarks.gpu", config) | {"steps": done}
    kind = re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower())
    begin = time.monotonic()
    for name, run in steps(config):
        print(f"{name}, after {time.monotonic() - begin:.0f} s")
        late = time.monotonic() - begin > config.budget_s
        done[name] = {"failed": "no time was left"} if late else guarded(run)
        if "failed" in done[name]:
            print(f"{name}: {done[name]['failed']}")
        records.write(config.out, f"gpu-{'toy-' * config.toy}{kind}", record, said=False)
        if "rows" in done[name]:
            print(columns.table(columns.named(done[name]["rows"]), COLUMNS))
    return record


def steps(config: Config) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Lists names and functions of what is measured."""
    shape = (8, 21) if config.toy else config.matrix
    models = {"tiny": TINY} if config.toy else {name: trees.SIZES[name] for name in config.models}
    checked = TINY if config.toy else trees.SIZES["gpt-small"]._replace(layers=2)
    methods = {name: METHODS[name] for name in TOYS} if config.toy else METHODS
    for table, n in (("jordan", 5), ("polar_express", 5), ("turbo", 4)):
        run = functools.partial(gpu_numbers.polar_factors, table, n, shape, methods)
        yield f"polar factors, {table}", run
    yield "update against the CPU", functools.partial(gpu_numbers.against_the_cpu, checked, methods)
    yield "update against Optax", functools.partial(gpu_numbers.against_optax, checked)
    if config.kernel:
        n = 64 if config.toy else 2048
        yield "symmetric kernel", functools.partial(gpu_numbers.symmetric_kernel, n)
    for name, size in models.items():
        yield f"updates of {name}", functools.partial(updates, size, config)
    yield "step of the trainer", functools.partial(step_of_the_trainer, config)


def updates(size: trees.Size, config: Config) -> Figures:
    """Measures time and memory of whole updates in turn."""
    shapes = trees.shapes(size, dtype=jnp.bfloat16)  # Optax multiplies in the gradients' dtype
    params, grads = trees.random_like(shapes, 0), trees.random_like(shapes, 1)
    dims = {"muon_weight_dimension_numbers": omp.muon_dimension_numbers(shapes)}
    rules: dict[str, tuple[Any, Method]] = {
        REFERENCE: (optax.contrib.muon(0.02, **dims), Method("bfloat16", polar="newton_schulz"))
    }
    for name in TIMED:
        given = METHODS[f"{name}, gram"]._replace(polar="auto")
        rule = omp.muonplus(0.02, compute_dtype=given.dtype, **parity.AS_OPTAX, **dims)
        rules[f"omp.muonplus, {name}"] = rule, given
    programs, rows = {}, {}
    for name, (rule, method) in rules.items():
        with gpu_numbers.products_in(method.precision):
            programs[name] = Update(rule, params, grads)
        polar: Any = method.polar
        needed = products.needed(size, polar, method.dtype)
        rows[name] = programs[name].figures | {"tflop": products.flops(needed) / 1e12}
    seconds = timing.interleaved(programs, config.rounds, config.calls)
    for name, row in rows.items():
        row |= timing.median_and_quartiles(seconds[name])
        row["of_optax"] = float(np.median(seconds[name] / seconds[REFERENCE]))
    stats = jax.devices()[0].memory_stats() or {}
    return {"rows": rows, "peak_bytes_in_use": stats.get("peak_bytes_in_use")}


def step_of_the_trainer(config: Config) -> Figures:
    """Measures seconds, tokens a second and the optimizer's share of a step of GPT-Small."""
    tiny = ModelConfig(n_layer=1, n_head=2, d_model=16, context=16)
    model = tiny if config.toy else PRESETS["gpt-small"][1].model
    vocabulary, tokens = (300, 32) if config.toy else (50_257, 16 * 2048)
    base = RunConfig(model=model)
    return training_step.measure(base, vocabulary, tokens, config.rounds, config.calls)


COLUMNS = (
    columns.word("update", "name"),
    columns.number("ms", "median_s", 2, 1e-3),
    columns.number("of Optax's", "of_optax", 3),
    ("TFLOP/s", lambda row: f"{row['tflop'] / row['median_s']:.0f}"),
    columns.number("temporary MB", "temporary_bytes", 0, 1e6),
    columns.number("compile s", "compile_s"),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.gpu", description=__doc__))
