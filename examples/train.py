"""Pretrains a language model with Muon+: `python -m examples.train`, `--help` for more."""

import signal
import sys
from collections.abc import Sequence

# `run` imports slow packages itself: Ctrl-C during the imports then ends with a sentence.
from examples.trainer.system.errors import leave, run_command


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        return run_command(lambda: run(argv))
    except KeyboardInterrupt:
        print("\nstopped before the run began.")
        return 128 + signal.SIGINT


def run(argv: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit status."""
    from examples.trainer.settings import command_line
    from examples.trainer.settings.command_line import NewRun

    asked, preset = command_line.parse(argv)
    # Questions about flags are answered above, without the seconds that these imports take.
    from examples.trainer.runs import launch, processes

    processes.join(asked.machine)
    if isinstance(asked, NewRun) and asked.against:
        return launch.compare(asked, preset)
    return launch.start(asked, preset)[0]


def is_one_of_several() -> bool:
    """Whether this process trains with others; only a run imports JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # JAX lets several processes take leave of each other, and ends those that wait in vain.
    sys.exit(status) if is_one_of_several() else leave(status)
