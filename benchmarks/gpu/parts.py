"""The three parts, as steps in order. Seconds are guesses for an H100 with an empty cache."""

import subprocess
from collections.abc import Iterator
from functools import partial

from rich.console import Console

from benchmarks.gpu import correctness, kernels, rates, text, training, updates
from benchmarks.gpu.settings import TOY, Settings
from benchmarks.gpu.steps import Figures, Step
from benchmarks.gpu.training import Rule
from benchmarks.gpu.updates import only
from benchmarks.gpu.variants import OURS, REFERENCE

WAIT_S = 120  # for the text, at the end of part 1


def part_1(settings: Settings, done: dict[str, Figures], console: Console) -> Iterator[Step]:
    """Correctness, rates, and whole updates beside Optax."""
    process = text.start(settings is TOY)
    try:
        yield Step("copy", 5, partial(rates.copy, settings, console))
        yield Step("square products", 30, partial(rates.square, settings, console))
        matrices = correctness.spectra(settings.matrix)
        for table, n in settings.tables:
            step = partial(correctness.of_table, table, n, matrices)
            yield Step(f"distance to float64, {table}", 20, step)
        yield Step("distance to Optax", 20, partial(correctness.as_optax, settings))
        for dtype in ("bfloat16", "float16"):
            step = partial(correctness.kernel, settings, dtype)
            yield Step(f"symmetric kernel, {dtype}", 30, step)
        for name, size in settings.models:
            for dtype in ("bfloat16", "float16"):
                step = partial(rates.of_shapes, size, dtype, settings, console)
                yield Step(f"products of {name}, {dtype}", 10, step)
        compared = only(*settings.compared)
        for (name, size), seconds in zip(settings.models, (40, 70, 110), strict=False):
            step = partial(updates.compare, size, compared, settings, console)
            yield Step(f"updates of {name}", seconds, step)
            step = partial(updates.compare, size, compared, settings, console, scanned=True)
            yield Step(f"updates of {name}, scanned", seconds / 2, step)
        yield Step("text", 0, partial(wait_for, process))
    finally:
        process.kill()
        process.wait()


def wait_for(process: subprocess.Popen[bytes]) -> Figures:
    """How the process that makes the tokens of part 3 ended."""
    return {"exit_status": process.wait(WAIT_S)}


def part_2(settings: Settings, done: dict[str, Figures], console: Console) -> Iterator[Step]:
    """Sweeps at six layers of LLaMA-1B, a look into an update, and a step of the trainer."""
    # First, since a peak never falls again; what needs less memory before what needs more.
    for name in (OURS, REFERENCE):
        yield Step(f"peak memory, {name}", 20, partial(updates.peak_memory, name, settings))
    for mib in settings.stack_mib:
        step = partial(updates.stack_bound, mib, settings, console)
        yield Step(f"stacks of {mib:g} MiB", 15, step)
    for name, swept in settings.sweeps:
        step = partial(updates.compare, settings.swept, only(*swept), settings, console)
        yield Step(f"sweep of {name}", 40, step)
    yield Step("mesh of one device", 30, partial(updates.one_device_mesh, settings, console))
    for name in (OURS, REFERENCE):
        yield Step(f"kernels, {name}", 20, partial(kernels.breakdown, name, settings))
    yield Step("step of the trainer", 120, partial(training.step, settings, console))


def part_3(settings: Settings, done: dict[str, Figures], console: Console) -> Iterator[Step]:
    """Training with Muon and Muon+ at several rates, then with several seeds at the best ones."""

    def run(rule: Rule, rate: float, seed: int) -> Step:
        walls = [x["wall_s"] for x in done.values() if "val_loss" in x]
        step = partial(training.train, rule, rate, seed, settings)
        return Step(f"{rule}, rate {rate}, seed {seed}", max(walls, default=60), step)

    rules = list(training.RULES)
    for rate in settings.rates:
        for rule in rules:
            yield run(rule, rate, 0)
        rules.reverse()  # the next run can use the program of this one
    for seed in settings.seeds:
        for rule in rules:
            if (rate := training.best_rate(rule, done)) is not None:
                yield run(rule, rate, seed)
        rules.reverse()
    yield Step("summary", 0, partial(training.summary, done))


PARTS = {1: part_1, 2: part_2, 3: part_3}
