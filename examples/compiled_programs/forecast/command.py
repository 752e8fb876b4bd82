"""`--compile-for`: compiles a run for a machine that is not there, and says what it would need."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.compiled_programs import targets
from examples.compiled_programs.forecast import children, estimate, table
from examples.compiled_programs.forecast.programs import PROGRAMS
from examples.compiled_programs.targets import Target
from examples.trainer.settings.command_line import PROGRAM, NewRun
from examples.trainer.system.errors import UserError
from examples.trainer.system.files import write_atomically
from examples.trainer.training import sharding
from examples.trainer.training.program import check_settings

WIDTH = 100


def forecast(asked: NewRun, preset: str, words: Sequence[str]) -> int:
    """Compiles, prints and writes; returns 0 if the run fits, 1 if not or if it is unknown."""
    console = Console(highlight=False, markup=False, width=min(WIDTH, Console().width))
    record = measure(asked, words, console)
    console.print()
    table.show(console, preset, asked.config, target_of(asked.compile_for), record)
    write(asked.json, record, console)
    return 0 if record["fits"] else 1


def measure(asked: NewRun, words: Sequence[str], console: Console) -> dict[str, Any]:
    """Finds the figures of the run that a command line asks for; says what it compiles."""
    check_settings(asked.config)
    target = target_of(asked.compile_for)
    mesh = sharding.mesh_sizes(asked.machine.mesh, target.devices)
    found = compile_all(console, words, PROGRAMS, target)
    record = {
        "command": f"{PROGRAM} {shlex.join(words)}",
        "target": asked.compile_for,
        "compilers": targets.compilers(target),
        "xla_flags": sharding.xla_flags(mesh),
        **estimate.record(asked.config, mesh, target, found),
        "config": dataclasses.asdict(asked.config),
    }
    if record["fits"] is False:
        record["advice"] = advice(console, words, asked, mesh, target, found)
    return record


def target_of(text: str) -> Target:
    """Finds the machine, if its compiler is installed."""
    try:
        target = targets.parse(text)
    except ValueError as error:
        raise UserError(f"--compile-for {text}: {error}.") from None
    if sentence := targets.missing(target):
        raise UserError(sentence)
    return target


def compile_all(
    console: Console, words: Sequence[str], names: Sequence[str], target: Target
) -> dict[str, Any]:
    """Compiles programs for their figures, and says each before it begins."""
    return children.figures(
        words, names, target, lambda name: console.print(f"compiling the {table.NAMES[name]} ...")
    )


def advice(
    console: Console,
    words: Sequence[str],
    asked: NewRun,
    mesh: dict[str, int],
    target: Target,
    found: dict[str, Any],
) -> str:
    """Says which flags make the run fit, by compiling a step with them."""
    state = found["init"].get("output_bytes")
    larger = "give more devices to fsdp" + (
        f": the state takes {table.gigabytes(state)} of each device now" if state else ""
    )
    flags = estimate.thriftier(asked.config, mesh)
    if not flags:
        return f"No flag makes a step smaller on this mesh: {larger}."
    written = shlex.join(flags)
    console.print(f"that does not fit; trying {written} ...")
    step = compile_all(console, [*words, *flags], PROGRAMS[:1], target)["train_step"]
    if "failed" in step:
        return f"It may fit with {written}, whose compiler died ({step['failed']}); or {larger}."
    peak = table.gigabytes(step["peak_bytes"])
    if not estimate.fits(step, 0, target):
        return f"With {written} a step still needs {peak}: {larger}."
    return f"With {written} it fits: a step then needs {peak}."


def write(path: Path | None, record: dict[str, Any], console: Console) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
        console.print(f"\nwritten to {path}")
