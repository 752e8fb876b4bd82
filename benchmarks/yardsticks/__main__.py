"""Yardsticks that others made, with published figures: `python -m benchmarks.yardsticks`."""

import sys
from typing import Any

import tyro

from benchmarks.yardsticks import least_squares, mnist1d, tiny_shakespeare
from examples.trainer.system import exit_status

YARDSTICKS: dict[str, Any] = {
    "least-squares": least_squares,
    "mnist1d": mnist1d,
    "tiny-shakespeare": tiny_shakespeare,
}


def command_line() -> int:
    """Runs the command line; returns the exit status."""
    defaults = {name: module.Config() for name, module in YARDSTICKS.items()}
    descriptions = {name: module.__doc__.partition("\n")[0] for name, module in YARDSTICKS.items()}
    asked = tyro.extras.subcommand_type_from_defaults(defaults, descriptions)
    config = tyro.cli(asked, prog="python -m benchmarks.yardsticks", description=__doc__)
    (module,) = (x for x in YARDSTICKS.values() if isinstance(config, x.Config))
    return exit_status.run_command(lambda: module.main(config))


if __name__ == "__main__":
    sys.exit(command_line())
