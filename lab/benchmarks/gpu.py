"""Measures the update on one GPU in four minutes: `python -m lab.benchmarks.gpu`.

    pip install -e '.[cuda13]' -r requirements/examples.txt && python -m lab.benchmarks.gpu

It times updates beside Optax's, and `torch.optim.Muon` and `dion.Muon` where they are installed;
`omp.contrib.hopper_polar` beside the plain iteration; and training steps beside AdamW's, with the
time that kernels of three classes take. Each part has a process and a time limit of its own. If one
fails, hangs or dies, its rows up to there are kept, and the others run. The JSON file is written
after each row. `--toy` shows on any machine that the parts run. `.ci/gpu` runs the core's tests
there, which compare polar factors with float64.
"""

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from lab.benchmarks import columns, records
from lab.compiled_programs import child

Row = dict[str, Any]
PARTS = {"kernel": 35.0, "gpt-small": 60.0, "step": 40.0, "float32": 45.0, "llama-1b": 55.0}
"""The seconds that each part may take, besides those that others leave; earlier parts are worth
more."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured."""

    parts: tuple[str, ...] = tuple(PARTS)
    """Some of kernel (polar factors), step (a training step of GPT-Small), and updates: gpt-small
    and llama-1b (parameters in bfloat16), and float32 (GPT-Small's)."""
    toy: bool = False
    """Tiny sizes, for any machine."""
    rounds: int = 7
    """How often programs are timed, in turn."""
    calls: int = 10
    """Runs that are enqueued before the last is waited for; a third of them for long ones."""
    budget_s: float = 235.0
    """Seconds for all parts together."""
    out: Path = Path("lab/results/benchmarks")
    """Folder for the JSON file."""
    part: str | None = None
    """Run this part in this process and print its rows as JSON."""


def main(config: Config) -> Row:
    """Runs all parts, prints each row as it comes and the table, and returns the record."""
    if unknown := sorted({*config.parts} - set(PARTS)):
        raise SystemExit(f"There is no part {', '.join(unknown)}. Parts are {', '.join(PARTS)}.")
    if config.part is not None:
        print_rows(config)
        return {}
    record: Row = {**records.describe_command("lab.benchmarks.gpu", config), "rows": []}
    end = time.monotonic() + config.budget_s
    # JAX would take three quarters of the GPU, which torch shares.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    for n, part in enumerate(config.parts):
        left_s, later_s = end - time.monotonic(), sum(PARTS[x] for x in config.parts[n + 1 :])
        limit_s = min(max(PARTS[part], left_s - later_s), left_s)
        print(f"{part}, {limit_s:.0f} s at most", flush=True)
        if limit_s > 0:
            run(part, config, environment, limit_s, record)
        else:
            keep(record, {"part": part, "failed": "no time was left"}, config)
    print(columns.table(record["rows"], COLUMNS, left=2))
    return record


def run(
    part: str, config: Config, environment: Mapping[str, str], limit_s: float, record: Row
) -> None:
    """Runs a part in a process and keeps each row as it comes."""
    options = dataclasses.replace(config, parts=Config.parts, part=part)
    command = [sys.executable, "-m", "lab.benchmarks.gpu", *records.flags(options)]
    with child.process(command, environment, limit_s) as (lines, ended):
        for line in lines:
            if "machine" in line:
                record["machine"] = line["machine"]
            else:
                keep(record, {"part": part, **line}, config)
        if how := ended():
            keep(record, {"part": part, "failed": how}, config)


def keep(record: Row, row: Row, config: Config) -> None:
    """Prints a row, adds it to the record, and writes the file."""
    row = {"name": "", **row}
    print(columns.table([row], COLUMNS, left=2).splitlines()[-1], row.get("failed", ""), flush=True)
    record["rows"].append(row)
    device = record.get("machine", {}).get("device", "unknown")
    kind = re.sub(r"[^a-z0-9]+", "-", device.lower())
    records.write(config.out, f"gpu-{'toy-' * config.toy}{kind}", record)


def print_rows(config: Config) -> None:
    """Prints the machine and the rows of one part."""
    # Imported here: the process that starts others must leave the GPU alone.
    from lab.benchmarks import gpu_rows

    print(json.dumps({"machine": records.describe_machine()}), flush=True)
    if not (config.toy or jax.default_backend() == "gpu"):
        raise SystemExit("JAX sees no GPU. Install .[cuda13] where a driver is, or pass --toy.")
    for row in gpu_rows.rows(config.part or "", config.toy, config.rounds, config.calls):
        print(json.dumps(row), flush=True)


COLUMNS: Sequence[columns.Column] = (
    columns.word("part", "part"),
    ("measured", lambda row: "failed" if "failed" in row else row["name"]),
    columns.number("ms", "median_s", 2, 1e-3),
    columns.number("of the reference", "of_reference", 3),
    columns.number("tokens/s", "tokens_per_s", 0),
    columns.number("TFLOP/s", "tflop_per_s", 0),
    columns.number("products ms", "products_s", 2, 1e-3),
    columns.number("traffic ms", "traffic_s", 2, 1e-3),
    columns.number("waiting ms", "waiting_s", 2, 1e-3),
    columns.number("kernels", "kernels", 0),
    columns.number("Mosaic calls", "mosaic_calls", 0),
    columns.number("distance", "distance", 4),
    columns.number("temporary MB", "temporary_bytes", 0, 1e6),
    columns.number("compile s", "compile_s"),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m lab.benchmarks.gpu", description=__doc__))
