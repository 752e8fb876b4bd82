"""The command; see the package's text for what the parts do."""

import argparse
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks import gpu, records
from benchmarks.gpu import steps
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.settings import TOY, Settings


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the command."""

    part: int = 0
    """1, 2 or 3."""
    toy: bool = False
    """Tiny sizes, which show on any machine that all steps run."""
    budget_s: float = 540.0
    """Seconds for the part."""
    out: Path = Path("results/benchmarks")
    """Folder for the JSON file."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs one part and returns its record, which is written after each step."""
    config = parse(argv)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    console = Console()
    device = jax.devices()[0]
    done: dict[str, Any] = {}
    record = {
        **records.describe_run("benchmarks.gpu", config),
        "devices": len(jax.devices()),
        "platform": device.client.platform_version,
        "steps": done,
    }
    console.print(f"part {config.part} on {len(jax.devices())} x {device.device_kind}")
    kind = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower())
    name = f"gpu-part{config.part}-{'toy-' if config.toy else ''}{kind}"
    quiet = Console(quiet=True)
    part = PARTS[config.part](TOY if config.toy else Settings(), done, console)
    steps.run_all(
        part,
        done,
        config.budget_s,
        lambda: records.write(config.out, name, record, quiet),
        console,
    )
    counts = {kind: sum(kind in x for x in done.values()) for kind in ("failed", "skipped")}
    console.print(f"{len(done)} steps, {counts}, written to {config.out / name}.json")
    return record


def parse(argv: Sequence[str] | None) -> Config:
    """The options on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Config()
    parser.add_argument("--part", type=int, choices=sorted(PARTS), required=True)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, for any machine")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=default.budget_s,
        help="seconds (%(default)g)",
    )
    parser.add_argument(
        "--out", type=Path, default=default.out, help="folder for the JSON file (%(default)s)"
    )
    return Config(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
