"""The record of a run: the command, the machine and the figures, in a JSON file."""

import dataclasses
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

import optax_muonplus as omp
from lab.sweeps.machine import commit, processor


def describe_machine() -> dict[str, str]:
    """Names the device, the processor, the commit and versions of packages."""
    return {
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")},
        "optax_muonplus": omp.__version__,  # it may be imported without being installed
    }


def describe_run(module: str, config: Any) -> dict[str, Any]:
    """Returns the command, the configuration and the machine, with which every record begins."""
    return describe_command(module, config) | {"machine": describe_machine()}


def describe_command(module: str, config: Any) -> dict[str, Any]:
    """Returns the command and the configuration, without asking JAX for its devices.

    Args:
      module: such as ``"lab.benchmarks.step"``.
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
    """Returns the words of options that differ from their defaults, without ``out``."""
    default = type(config)()
    words = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = field.name.replace("_", "-")
        if field.name == "out" or value == getattr(default, field.name):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def write(folder: Path | None, name: str, record: dict[str, Any]) -> None:
    """Writes ``folder/name.json``, whole or not at all; does nothing without a folder."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    begun = folder / f"{name}.json.part"
    begun.write_text(json.dumps(record, indent=1) + "\n")
    begun.replace(folder / f"{name}.json")
