"""What XLA reports of a run on an absent machine: `python -m lab.compile RECIPE --for h100:8`.

It trains nothing. The machine's own compiler compiles the programs of the run, from shapes alone.
That is done in another process: its environment differs, and a compiler may die.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from examples.trainer.runs.launch import check_settings
from examples.trainer.settings import command_line
from examples.trainer.settings.command_line import NewRun
from examples.trainer.system.errors import UserError, run_command
from lab.compiled_programs import targets
from lab.compiled_programs.targets import Target

PROGRAM = "python -m lab.compile"
USAGE = f"{PROGRAM} [PRESET] --for MACHINE [FLAGS]"
DESCRIPTION = """Compiles a training for a machine that need not be there, and prints whether it
fits: memory of each program, products and collectives of a step."""
FLAGS = "Presets and all other flags are those of `python -m examples.train`, --mesh among them."


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, usage=USAGE, description=DESCRIPTION, epilog=FLAGS, allow_abbrev=False
    )
    machines = "h100:N, v5e:4x4, v5p:2x2x1, v6e:2x2 or cpu:N"
    parser.add_argument("--for", dest="machine", metavar="MACHINE", required=True, help=machines)
    known, words = parser.parse_known_args(argv)
    return run_command(lambda: compile_for(known.machine, words))


def compile_for(machine: str, words: Sequence[str]) -> int:
    """Compiles in another process; 0 if the run fits, 1 if it does not, 2 after an error."""
    asked, _ = command_line.parse(words)
    if not isinstance(asked, NewRun):
        raise UserError("only a new run is compiled: give its preset and flags, not --resume.")
    check_settings(asked.config)
    variables = targets.environment(target_of(machine))
    command = [sys.executable, "-m", "lab.compiled_programs.training", machine, *words]
    status = subprocess.run(command, env=variables, check=False).returncode
    if status < 0:
        raise UserError(f"the compiler for {machine} died of signal {-status}.")
    return status


def target_of(machine: str) -> Target:
    """The machine, if its compiler is installed."""
    try:
        target = targets.parse(machine)
    except ValueError as error:
        raise UserError(f"--for {machine}: {error}.") from None
    if sentence := targets.missing(target):
        raise UserError(sentence)
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
