"""Compares the trainer with a recorded training: `python -m examples.parity FILE.npz --heads N`."""

import sys
from collections.abc import Sequence

import tyro

from examples.trainer.parity import recording, replay
from examples.trainer.parity.replay import Parity
from examples.trainer.runs.launch import keep_compiled_programs
from examples.trainer.settings import validation
from examples.trainer.system.exit_status import run_command
from examples.trainer.training import optimizers

PROGRAM = "python -m examples.parity"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: run(tyro.cli(Parity, args=argv, prog=PROGRAM)))


def run(parity: Parity) -> int:
    """Prints the differences; 1 if one of them is not allowed."""
    validation.check(parity)
    optimizers.check(parity.optimizer)
    keep_compiled_programs()
    recorded = recording.read(parity.file)
    models = {
        family: replay.load(parity.file, recorded, family, parity.heads)
        for family in recorded.families
    }
    steps, pieces, rows, tokens = recorded.inputs.shape
    print(f"{parity.file}: {steps} steps of {pieces} x {rows} rows of {tokens} tokens")
    for family, model in models.items():
        print(replay.described(family, model))
    print(f"\n{replay.HEADER}")
    found = []
    for family, model in models.items():
        for difference in replay.compare(parity, recorded, family, model):
            print(difference, flush=True)
            found.append(difference)
    large = sum(not difference.is_small for difference in found)
    if large:
        print(f"\n{large} of {len(found)} are larger than allowed (marked with !).")
    return int(large > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
