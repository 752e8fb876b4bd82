"""What a forecast prints."""

import textwrap
from collections.abc import Callable
from typing import Any

from rich.console import Console

from examples.compiled_programs.forecast.estimate import XLA_DEFAULT, usable
from examples.compiled_programs.targets import Target
from examples.trainer.settings.run import RunConfig
from examples.trainer.system import tables
from examples.trainer.system.chips import CHIPS

NAMES = {"train_step": "training step", "evaluation": "evaluation", "init": "initial state"}
LABEL = 18  # columns in front of the figures


def show(console: Console, preset: str, config: RunConfig, target: Target, record: Any) -> None:
    rows = record["rows_of_a_device"]
    pieces = "at once" if config.accumulate == 1 else f"in {config.accumulate} pieces"
    devices = f"{target.devices} devices simulated by this CPU"
    if target.kind != "cpu":
        devices = f"{target.devices} x {CHIPS[target.kind].name}"
    axes = " ".join(f"{axis}={size}" for axis, size in record["mesh"].items())
    line(console, "run", f"{preset}, {config.batch_size} rows of {config.model.context} tokens")
    line(console, "devices", f"{devices}, {axes}")
    line(console, "a step", f"{pieces}, {rows} row{'s' * (rows > 1)} a device at a time")
    if record["attention"]:
        line(console, "kernels", record["attention"])
    if record["xla_flags"]:
        line(console, "flags of XLA", record["xla_flags"])
    console.print()
    console.out(programs_table(record, target), highlight=False)
    for name, figures in record["programs"].items():
        for key in figures.keys() & {"failed", "refused"}:
            line(console, NAMES[name], figures[key])
    console.print()
    line(console, "fits", verdict(record, target))
    if advice := record.get("advice"):
        line(console, "", advice)
    show_work(console, record)
    console.print()
    console.print(record["assumptions"], style="dim")


def line(console: Console, label: str, text: str) -> None:
    width = max(console.width - LABEL, LABEL)
    for i, part in enumerate(textwrap.wrap(text, width)):
        console.print(f"{'' if i else label:{LABEL}}{part}")


def programs_table(record: Any, target: Target) -> str:
    """Writes memory of a device and time to compile, a row for each program."""
    lines = []
    for name, figures in record["programs"].items():
        sizes = [figures.get(f"{part}_bytes") for part in ("argument", "temporary", "peak")]
        cells = ["" if size is None else gigabytes(size) for size in sizes]
        share = "" if sizes[2] is None else f"{100 * sizes[2] / target.memory:.0f}%"
        seconds = f"{figures['compile_s']:.0f} s" if "compile_s" in figures else ""
        lines.append([NAMES[name].ljust(LABEL - 2), *cells, share, seconds])
    head = ["program", "arguments", "temporaries", "peak", "of memory", "compiled in"]
    return tables.plain(head, lines)


def verdict(record: Any, target: Target) -> str:
    if record["fits"] is None:
        return "unknown: not all programs were compiled"
    if not record["fits"]:
        return f"no: a device has {gigabytes(usable(target))} for programs"
    peak = max(figures["peak_bytes"] for figures in record["programs"].values())
    more = ""
    if target.is_gpu and peak > XLA_DEFAULT * target.memory:
        more = "; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92, as JAX takes 75% of a GPU by default"
    return f"yes: {gigabytes(peak)} of {gigabytes(target.memory)} a device{more}"


def show_work(console: Console, record: Any) -> None:
    """Prints operations, collectives and the estimated time, if there are any."""
    flops, even = record["flops_per_device"], record["flops_even_share"]
    if flops is not None:
        share = "" if even is None else f", {flops / even:.3f} of an even share"
        line(console, "FLOPs", f"{teraflop(flops)} a device and step{share}")
    if record["collectives"] == {}:
        line(console, "collectives", "none")
    sent = sorted((record["collectives"] or {}).items(), key=lambda x: -x[1]["received_bytes"])
    for i, (kind, x) in enumerate(sent):
        received = f"{x['count']:,.0f} {kind}, {gigabytes(x['received_bytes'])} received"
        line(console, "" if i else "collectives", received)
    if speed := record["estimate"]:
        line(console, "estimated step", span(speed, "step_s", seconds))
        line(console, "", f"{seconds(speed['attention_s'])} of it in kernels of attention")
        if (waited := speed["waited_s"]) is not None:
            sent = seconds(speed["collectives_s"])
            line(console, "", f"{seconds(waited)} of it waiting for collectives, of {sent}")
        line(console, "tokens/s", span(speed, "tokens_per_second", lambda x: f"{x:,.0f}"))
        line(console, "MFU", span(speed, "mfu", lambda x: f"{100 * x:.1f}%"))
        line(console, "optimizer", f"{100 * speed['optimizer_share']:.1f}% of the estimated step")


def span(speed: dict[str, float], name: str, written: Callable[[float], str]) -> str:
    """Writes a figure, and the one of a program that hides its collectives if it differs."""
    first, second = written(speed[name]), written(speed[f"{name}_hidden"])
    return first if first == second else f"{first}, {second} if all collectives are hidden"


def seconds(x: float) -> str:
    return f"{x:.2f} s" if x >= 1 else f"{1e3 * x:.1f} ms"


def teraflop(n: float) -> str:
    """Writes operations as TFLOP, or GFLOP where that would be all zeros."""
    return f"{n / 1e12:,.1f} TFLOP" if n >= 1e11 else f"{n / 1e9:,.3f} GFLOP"


def gigabytes(n: float) -> str:
    """Writes bytes as GB, or MB where that would be all zeros."""
    return f"{n / 1e9:,.2f} GB" if n >= 1e8 else f"{n / 1e6:,.2f} MB"
