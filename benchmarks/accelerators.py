"""One update, compiled for accelerators that are not there: `python -m benchmarks.accelerators`.

Nothing is run. The compilers are those of the accelerators, and the figures are what they wrote.
`--help` lists the options.
"""

import dataclasses
import functools
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from rich.console import Console

from benchmarks import accelerator_row, records, trees
from benchmarks.accelerator_row import REFERENCE, ROWS
from examples.compiled_programs import targets
from examples.trainer.system import tables


@dataclasses.dataclass(frozen=True)
class Config:
    """The update and the accelerators that it is compiled for."""

    target: str = "h100:1"
    """`h100:N`, or a kind of TPU and its layout: `v5e:4x4`, `v5p:2x2x1`, `v6e:2x2`, `v5e:1`."""
    tree: Literal["gpt-small", "llama-350m", "llama-1b", "llama-7b"] = "gpt-small"
    """Shapes of the parameters."""
    scanned: bool = False
    """One leaf for a kernel of all layers, with a leading axis, in place of one leaf a layer."""
    layers: int | None = None
    """Number of layers, if not the model's own."""
    width: int | None = None
    """Width, if not the model's own; the feed-forward width is scaled with it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of parameters and gradients, and so of Optax's products."""
    per_head: int | None = None
    """Outputs of one attention head: this package then takes each head of queries, keys and values
    for a matrix. Other rows have whole kernels."""
    mesh: str | None = None
    """Axes of the mesh, such as `data=4,model=2`; by default all devices are the axis `data`."""
    spec: str = "data"
    """The mesh axis that cuts the rows of each matrix, then the one that cuts its columns; `-` is
    none. `data` is FSDP."""
    rows: tuple[str, ...] = tuple(ROWS)[:4]
    """Which rows to compile, of optax.contrib.muon, omp.muon:bfloat16, omp.muonplus:bfloat16,
    omp.muonplus:float16, omp.muonplus:float32 and maxtext.muon. Those of this package have Optax's
    momentum, shape factor and AdamW; `omp.muonplus:bfloat16:default` has its defaults. With
    `:symmetric` behind bfloat16 or float16, symmetric products are left to the kernel for Hopper,
    which needs JAX 0.11."""
    maxtext: Path | None = None
    """Folder of a checkout of MaxText, for its row; by default the installed package."""
    row: str | None = None
    """Compile this row in this process and print its figures as JSON. The command starts itself so
    for each row, in the environment that the compiler needs."""
    limit_s: int = 1800
    """Seconds after which a row is given up."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Compiles and prints the table; writes it with the machine's description as JSON."""
    try:
        target = targets.parse(config.target)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if sentence := targets.missing(target):
        raise SystemExit(sentence)
    if unknown := sorted({*config.rows, *([config.row] if config.row else [])} - set(ROWS)):
        raise SystemExit(f"There is no row {', '.join(unknown)}. Rows are {', '.join(ROWS)}.")
    if config.row is not None:
        print(json.dumps(figures(config, config.row)))
        return
    jax.config.update("jax_platforms", "cpu")  # plugins would complain of devices that are missing
    console = Console(width=max(Console().width, 300))  # the table is wide
    rows = {}
    for name in config.rows:
        console.print(f"compiling {name}")
        rows[name] = row_of_process(command(config, name), target, config.limit_s)
    show(console, target, rows)
    record = {
        **records.describe_run("benchmarks.accelerators", config),
        "compilers": targets.compilers(target),
        "assumptions": assumptions(target),
        "rows": rows,
    }
    records.write(config.out, file_name(config), record, console)


def figures(config: Config, name: str) -> dict[str, Any]:
    """The figures of one row, compiled in this process."""
    target = targets.parse(config.target)
    size = trees.resized(trees.SIZES[config.tree], config.layers, config.width)
    tree = accelerator_row.placed(
        size, config.dtype, target, config.mesh, config.spec, config.scanned
    )
    return accelerator_row.figures(name, tree, target, config.maxtext, config.per_head)


def command(config: Config, name: str) -> list[str]:
    """The command that compiles one row."""
    options = dataclasses.replace(config, rows=Config.rows, row=name)
    flags = [part for flag in records.flags(options) for part in shlex.split(flag)]
    return [sys.executable, "-m", "benchmarks.accelerators", *flags]


def row_of_process(arguments: list[str], target: targets.Target, limit_s: int) -> dict[str, Any]:
    """The figures that a process prints; if it fails, how it ended and its last line of errors."""
    run = functools.partial(subprocess.run, capture_output=True, text=True)
    try:
        done = run(arguments, env=targets.environment(target), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"not compiled after {limit_s} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    code = done.returncode
    ended = f"exit {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {"failed": f"{ended}: {lines[-1][:300] if lines else 'no message'}"}


def assumptions(target: targets.Target) -> str:
    """What the figures are made of, in words."""
    nothing = "Nothing was run: these are programs of the real compiler, read as text."
    loops = (
        "Loops count as often as they run, a conditional with the branch that its device takes, or"
        " with its most expensive one. Figures are of the device with most work."
    )
    if not target.is_gpu:
        return f"{nothing} Cycles are libtpu's own estimates, without collectives. {loops}"
    rates = target.rates
    return (
        f"{nothing} Roofline: one kernel after another, each as long as its bytes at"
        f" {rates.memory / 1e12:.1f} TB/s or its products at {rates.half / 1e12:.0f} TFLOP/s"
        f" ({rates.tf32 / 1e12:.0f} in TF32, {rates.float32 / 1e12:.0f} in float32), whichever is"
        f" longer; collectives at {rates.link / 1e9:.0f} GB/s. Products are cuBLASLt calls, and"
        " nothing was autotuned. The kernel for symmetric products counts with the blocks that it"
        f" computes, at the same rate, which nobody has measured. {loops}"
    )


def show(console: Console, target: targets.Target, rows: dict[str, Any]) -> None:
    """Prints the table in Markdown, ready for the README."""
    console.print(assumptions(target))
    columns = _GPU if target.is_gpu else _TPU
    names = (x for name in columns for x in (name, *_ratio(columns[name])))
    lines = []
    reference = rows.get(REFERENCE, {})
    failed = []
    for name, row in rows.items():
        if "failed" in row:
            failed.append(f"{name} has no figures: {row['failed']}")
            continue
        cells = []
        for key, unit, digits, compared in columns.values():
            cells.append(f"{_sum(row[key]) / unit:.{digits}f}")
            if compared:
                base = _sum(reference.get(key, 0))
                cells.append(f"{_sum(row[key]) / base:.2f}" if base else "")
        listed = (f"{n} {kind}" for kind, n in row["collectives"].items())
        lines.append([name, *cells, ", ".join(listed)])
    console.out(tables.markdown(["update", *names, "collectives"], lines))
    for sentence in failed:
        console.print(sentence)


def _ratio(column: tuple[str, float, int, bool]) -> tuple[str, ...]:
    return ("of Optax's",) if column[3] else ()


def _sum(figure: Any) -> float:
    return sum(figure.values()) if isinstance(figure, dict) else figure


# Header: key of the figure, its unit, digits, and whether it is compared with Optax's.
_MEMORY = {
    "temporary MB": ("temporary_bytes", 1e6, 1, True),
    "MB received": ("received_bytes", 1e6, 1, False),
    "compile s": ("compile_s", 1, 1, False),
}
_GPU = {
    "roofline ms": ("roofline_s", 1e-3, 2, True),
    "GB beside products": ("bytes_beside_products", 1e9, 2, True),
    "TFLOP": ("operations_of_products", 1e12, 2, True),
    "kernels": ("kernels", 1, 0, True),
    **_MEMORY,
}
_TPU = {
    "million cycles": ("estimated_cycles", 1e6, 1, True),
    "estimated operations": ("kernels", 1, 0, True),
    **_MEMORY,
}


def file_name(config: Config) -> str:
    """Says what was compiled, for which devices."""
    changed = [f"{name}{value}" for name in ("width", "layers") if (value := getattr(config, name))]
    form = ["scanned"] if config.scanned else []
    heads = ["per-head"] if config.per_head else []
    mesh = [config.mesh.replace("=", "").replace(",", "-")] if config.mesh else []
    by = [] if config.spec == "data" else [f"by-{config.spec.replace('-', 'none')}"]
    target = config.target.replace(":", "-")
    parts = ["accelerators", target, config.tree, *form, *changed, *heads, *mesh, *by, config.dtype]
    return "-".join(parts).replace(",", "-")


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.accelerators", description=__doc__))
