"""Compiles programs of a run in this process: `children.py` starts it.

The arguments are the programs, with commas, and the command line of the trainer. Each line of
output is JSON: the program that begins, its figures, or why the run cannot be.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from examples.compiled_programs import targets
from examples.compiled_programs.forecast import even_share, programs
from examples.compiled_programs.targets import Target
from examples.trainer.models import attention_kernels
from examples.trainer.models.layers import Layout
from examples.trainer.settings import command_line
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.program import check_settings


def main(argv: Sequence[str]) -> None:
    """Compiles what the arguments name, one program after the other."""
    names, *words = argv
    asked, _ = command_line.parse(words)
    assert isinstance(asked, command_line.NewRun)
    try:
        check_settings(asked.config)
        sharding.set_xla_flags(asked.machine.mesh, os.environ)  # as a run does
        target = targets.parse(asked.compile_for)
        if target.is_gpu:
            targets.assume_cudnn()
        mesh = sharding.make_mesh(asked.machine.mesh, list(targets.devices(target)))
        program = programs.make(asked.config, mesh)
        for name in names.split(","):
            say({"begin": name})
            traced = programs.traced(name, program, asked.config, mesh)
            found = programs.compiled_figures(traced, target)
            if name == "train_step":
                found |= even(asked.config, target, mesh.devices.flat[0], traced)
                found["attention"] = attention_kernels.describe(asked.config.model, Layout(mesh))
            say({"program": name, "figures": found})
    except UserError as error:
        say({"error": str(error)})


def even(config: RunConfig, target: Target, device: Any, traced: Any) -> dict[str, Any]:
    """What one device of an even share does: the products of a step on one device, divided."""
    platform = "cuda" if target.is_gpu else "tpu" if target.is_tpu else "cpu"
    if target.devices > 1:
        alone = sharding.make_mesh("", [device])
        traced = programs.traced("train_step", programs.make(config, alone), config, alone)
    try:
        return {"even_flops": even_share.operations(traced.jaxpr.jaxpr, platform) / target.devices}
    except ValueError as error:
        return {"even_flops": None, "not_counted": str(error)}


def say(line: dict[str, Any]) -> None:
    """Prints a line at once, so that it is read even if the compiler dies next."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
