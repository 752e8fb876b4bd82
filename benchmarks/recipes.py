"""The paper's recipes on the smallest machines that they fit: `python -m benchmarks.recipes`.

Each is compiled for its machine, which need not be there, as `python -m examples.train RECIPE
--machine MACHINE --compile-for TARGET` does. Nothing is run.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from examples.compiled_programs import targets
from examples.compiled_programs.forecast.command import measure, write
from examples.trainer.settings import command_line, machines
from examples.trainer.settings.presets import ROWS
from examples.trainer.system import tables


@dataclasses.dataclass(frozen=True)
class Config:
    """Recipes and machines."""

    recipes: tuple[str, ...] = tuple(ROWS)
    """Which of the recipes."""
    machine: str = ""
    """A machine such as h100-64; empty: the smallest of each kind that a recipe fits."""
    kinds: tuple[str, ...] = ("h100", "v5e", "v5p")
    """Which kinds of machines, if none is named."""
    out: Path | None = None
    """Folder for a JSON file of each recipe and machine; nothing is written without it."""
    read: bool = False
    """Compile nothing: print the table of the files in `out`."""


def main(config: Config) -> None:
    """Compiles, writes, and prints the table."""
    console = Console(width=max(Console().width, 200))
    records = {}
    for name, machine in asked_for(config):
        path = config.out and config.out / f"fit-{name}-{machine}.json"
        if config.read:
            if path and path.exists():
                records[name, machine] = json.loads(path.read_text())
            continue
        target = machine.replace("-", ":")
        if sentence := targets.missing(targets.parse(target)):
            console.print(f"{name} on {machine} is left out: {sentence}")
            continue
        words = [name, "--machine", machine, "--compile-for", target]
        asked, _ = command_line.parse(words)
        assert isinstance(asked, command_line.NewRun)
        console.print(f"{name} on {machine}")
        records[name, machine] = measure(asked, words, console)
        write(path, records[name, machine], console)
    console.out(table(records))


def asked_for(config: Config) -> list[tuple[str, str]]:
    """Lists pairs of a recipe and a machine."""
    if unknown := sorted({*config.recipes} - set(ROWS)):
        raise SystemExit(f"There is no recipe {', '.join(unknown)}. Recipes are {', '.join(ROWS)}.")
    if config.machine:
        return [(name, config.machine) for name in config.recipes]
    fits = ((name, fit) for name in config.recipes for fit in machines.FITS[name])
    return [(name, fit.smallest) for name, fit in fits if fit.kind in config.kinds]


def table(records: dict[tuple[str, str], Any]) -> str:
    """Writes the figures in Markdown, ready for a README."""
    head = ["`python -m examples.train`", "rows x pieces", "state GB", "peak GB", "of memory"]
    head += ["FLOPs share", "collectives", "received", "step", "MFU", "optimizer", "all steps"]
    lines = (
        [f"`{name} --machine {machine}`", *cells(record)]
        for (name, machine), record in records.items()
    )
    return tables.markdown(head, lines, left=2)


def cells(record: dict[str, Any]) -> list[str]:
    """Writes the figures of one row; without a time where no program came out."""
    config, programs = record["config"], record["programs"]
    pieces = f"{record['rows_of_a_device']} x {config['accumulate']}"
    if record["fits"] is None:
        return [pieces, "", "unknown"]
    peak = max(program.get("peak_bytes", 0) for program in programs.values())
    state = programs["init"].get("output_bytes", 0)
    share = f"{100 * peak / record['device_bytes']:.0f}%"
    size = [pieces, f"{state / 1e9:.2f}", f"{peak / 1e9:.1f}", share]
    speed, received = record["estimate"], record["collectives"]
    if speed is None or received is None:
        return size
    return [
        *size,
        f"{record['flops_per_device'] / record['flops_even_share']:.3f}",
        f"{sum(kind['count'] for kind in received.values()):,.0f}",
        f"{sum(kind['received_bytes'] for kind in received.values()) / 1e9:.1f} GB",
        f"{speed['step_s']:.2f} s",
        f"{100 * speed['mfu']:.0f}%",
        f"{100 * speed['optimizer_share']:.1f}%",
        in_words(config["steps"] * speed["step_s"]),
    ]


def in_words(seconds: float) -> str:
    """Writes minutes, hours or days."""
    hours = seconds / 3600
    if hours < 2:
        return f"{60 * hours:.0f} min"
    return f"{hours:,.0f} h" if hours < 100 else f"{hours / 24:,.0f} days"


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.recipes", description=__doc__))
