"""What a machine with one GPU can tell in ten minutes: `python -m benchmarks.gpu`.

    pip install -e '.[cuda]' -r requirements/examples.txt && python -m benchmarks.gpu

It times whole updates beside Optax's, the experimental kernel for symmetric products, and a step
of the trainer for GPT-Small, and compares polar factors with float64. Each part runs in its own
process and has its own time: one that fails, hangs or dies says so, its rows up to there are kept,
and the others run. The JSON file is written after each row. Nothing is downloaded. `--toy` shows on
any machine that the parts run.
"""

import dataclasses
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from benchmarks import columns, records
from examples.compiled_programs.forecast import children

Row = dict[str, Any]
PARTS = {
    "gpt-small": 110.0,
    "kernel": 60.0,
    "step": 160.0,
    "llama-1b": 120.0,
    "numbers": 110.0,
    "stacks": 60.0,
}
"""Part to the seconds that it may take; those before are worth more."""
SHAPES = {"gpt-small": "GPT-Small", "llama-1b": "half of LLaMA-1B's layers"}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured."""

    parts: tuple[str, ...] = tuple(PARTS)
    """Some of gpt-small and llama-1b (whole updates), kernel, step, numbers and stacks."""
    toy: bool = False
    """Tiny sizes, for any machine."""
    rounds: int = 7
    """How often programs are timed, in turn."""
    calls: int = 10
    """Updates that are enqueued before the last is waited for."""
    budget_s: float = 580.0
    """Seconds for all parts together."""
    out: Path = Path("results/benchmarks")
    """Folder for the JSON file."""
    part: str | None = None
    """Run this part in this process and print its rows as JSON."""


def main(config: Config) -> dict[str, Any]:
    """Runs all parts, prints the table and README's sentence, and returns the record."""
    if unknown := sorted({*config.parts} - set(PARTS)):
        raise SystemExit(f"There is no part {', '.join(unknown)}. Parts are {', '.join(PARTS)}.")
    if config.part is not None:
        print_rows(config)
        return {}
    record: dict[str, Any] = {**records.describe_command("benchmarks.gpu", config), "rows": []}
    end = time.monotonic() + config.budget_s
    with tempfile.TemporaryDirectory() as cache:  # of what two parts compile alike
        environment = {"JAX_COMPILATION_CACHE_DIR": cache} | os.environ
        for part in config.parts:
            limit_s = min(PARTS[part], end - time.monotonic())
            print(f"{part}, {limit_s:.0f} s at most", flush=True)
            if limit_s > 0:
                run(part, config, environment, limit_s, record)
            else:
                keep(record, {"part": part, "failed": "no time was left"}, config)
    print(columns.table(record["rows"], COLUMNS, left=2))
    print(sentence(record))
    return record


def run(
    part: str, config: Config, environment: Mapping[str, str], limit_s: float, record: Row
) -> None:
    """Runs a part in a process and keeps each row as it comes."""
    options = dataclasses.replace(config, parts=Config.parts, part=part)
    flags = [word for flag in records.flags(options) for word in shlex.split(flag)]
    command = [sys.executable, "-m", "benchmarks.gpu", *flags]
    with children.process(command, environment, limit_s) as (lines, ended):
        for line in lines:
            if "machine" in line:
                record["machine"] = line["machine"]
            else:
                keep(record, {"part": part, **line}, config)
        if how := ended():
            keep(record, {"part": part, "failed": how}, config)


def keep(record: Row, row: Row, config: Config) -> None:
    """Adds a row to the record, and writes the file."""
    if "failed" in row:
        print(f"{row['part']}: {row['failed']}", flush=True)
    record["rows"].append({"name": "", **row})
    device = record.get("machine", {}).get("device", "unknown")
    kind = re.sub(r"[^a-z0-9]+", "-", device.lower())
    records.write(config.out, f"gpu-{'toy-' * config.toy}{kind}", record, said=False)


def print_rows(config: Config) -> None:
    """Prints the machine and the rows of one part."""
    from benchmarks import (
        gpu_parts,
    )  # here: the process that starts others must leave the GPU alone

    print(json.dumps({"machine": records.describe_machine()}), flush=True)
    if not (config.toy or gpu_parts.has_gpu()):
        raise SystemExit("JAX sees no GPU. Install .[cuda] where a driver is, or pass --toy.")
    for row in gpu_parts.rows(config.part or "", config.toy, config.rounds, config.calls):
        print(json.dumps(row), flush=True)


def sentence(record: Row) -> str:
    """Writes what README may say: only what was measured."""
    found = {(row["part"], row["name"]): row for row in record["rows"]}
    said = []
    for part in ("gpt-small", "llama-1b"):
        if row := found.get((part, "omp.muonplus, bfloat16")):
            time_of = f"{1e3 * row['median_s']:.1f} ms, {row['of_reference']:.2f} of Optax's Muon"
            said.append(f"an update of {SHAPES[part]} takes {time_of}")
    if row := found.get(("kernel", "one triangle")):
        said.append(f"the kernel takes {row['of_reference']:.2f} of the plain polar factor's time")
    if row := found.get(("step", "muonplus")):
        share = f"{100 * row['optimizer_share']:.1f}%"
        said.append(f"the optimizer is {share} of a training step of GPT-Small")
    if not said:
        return "Nothing was measured that README has a sentence for."
    return f"On one {record['machine']['device']}: {'; '.join(said)}."


def distance(row: Mapping[str, Any]) -> str:
    """Writes how far a result is from what it should be."""
    return f"{row['distance']:.1e}" if "distance" in row else ""


COLUMNS: Sequence[columns.Column] = (
    columns.word("part", "part"),
    ("measured", lambda row: "failed" if "failed" in row else row["name"]),
    columns.number("ms", "median_s", 2, 1e-3),
    columns.number("of reference", "of_reference", 3),
    columns.number("TFLOP/s", "tflop_per_s", 0),
    columns.number("temporary MB", "temporary_bytes", 0, 1e6),
    columns.number("compile s", "compile_s"),
    ("distance", distance),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.gpu", description=__doc__))
