"""Pretrains a language model with Muon+: `python -m examples.train`, `--help` for more."""

import signal
import sys
from collections.abc import Sequence

# `run` imports slow packages itself: Ctrl-C during the imports then ends with a sentence.
from examples.trainer.system import exit_status
from examples.trainer.system.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        return exit_status.run_command(lambda: run(argv), process_label)
    except KeyboardInterrupt:
        print("\nstopped before the run began.")
        return exit_status.of_signal(signal.SIGINT)


def run(argv: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit status."""
    from examples.trainer.settings import command_line
    from examples.trainer.settings.command_line import NewRun

    asked, preset = command_line.parse(argv)
    # Questions about flags are answered above, without the seconds that these imports take.
    import jax

    from examples.trainer.runs import launch, processes

    if isinstance(asked, NewRun) and asked.compile_for:
        from examples.trainer.runs.compile_for import compile_for

        return compile_for(asked, argv)
    try:
        processes.join(asked.machine)
        if isinstance(asked, NewRun) and asked.against:
            from examples.trainer.runs.against import compare

            return compare(asked, preset)
        return launch.start(asked, preset)[0]
    except Exception as error:
        of_network = isinstance(error, ConnectionError | TimeoutError)
        said = isinstance(error, UserError | OSError) and not of_network
        if said or not jax.distributed.is_initialized():
            raise
        processes.exit_without_others(error)


def process_label() -> str:
    """Names this process in a message if there are several, which only a run can find out."""
    processes = sys.modules.get("examples.trainer.runs.processes")
    return processes.process_label() if processes else ""


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Several processes take leave of each other first.
    sys.exit(status) if process_label() else exit_status.leave(status)
