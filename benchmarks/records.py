"""The record of a run: the command, the machine and the figures, in a JSON file."""

import dataclasses
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

from examples.trainer.system.files import write_atomically


def describe_machine() -> dict[str, str]:
    """Names the device, the processor and versions of packages."""
    import optax_muonplus as omp  # here: some benchmarks measure the library of another checkout

    packages = ("jax", "jaxlib", "optax")
    return {
        "device": jax.devices()[0].device_kind,
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "optax_muonplus": omp.__version__,  # it may be imported without being installed
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else ())
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def describe_run(module: str, config: Any) -> dict[str, Any]:
    """Says the command, the configuration and the machine, with which every record begins."""
    return describe_command(module, config) | {"machine": describe_machine()}


def describe_command(module: str, config: Any) -> dict[str, Any]:
    """Says the command and the configuration, without asking JAX for its devices.

    Args:
      module: such as ``"benchmarks.step"``.
      config: dataclass of the command's options. The folder ``out`` is left out, as it does not
        change the figures.
    """
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del options["out"]
    paths = {name: str(value) for name, value in options.items() if isinstance(value, Path)}
    return {
        "command": " ".join(["python -m", module, *flags(config)]),
        "config": options | paths,
    }


def flags(config: Any) -> list[str]:
    """Writes options that differ from their defaults as on a command line, without ``out``."""
    default = type(config)()
    arguments = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = field.name.replace("_", "-")
        if field.name == "out" or value == getattr(default, field.name):
            continue
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            arguments.append(f"--{name} {' '.join(map(str, value))}")
        else:
            arguments.append(f"--{name} {value}")
    return arguments


def write(folder: Path | None, name: str, record: dict[str, Any], said: bool = True) -> None:
    """Writes ``folder/name.json`` and prints that path; does nothing without a folder."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    if said:
        print(f"written to {path}")
