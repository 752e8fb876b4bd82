"""Pretrains a language model with Muon+: `python -m examples.train`, `--help` for more."""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from examples import command, optimizers, processes, runs, sharding
from examples import config as configs
from examples.command import NewRun, Resume
from examples.compilation import keep_compiled_programs
from examples.config import RunConfig
from examples.data.prepare import prepare
from examples.errors import UserError
from examples.execute import execute
from examples.generate import sample_text
from examples.job import Job, assemble
from examples.progress import Display
from examples.results import write_results
from examples.signals import exit_status
from examples.training import TrainState


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        asked, preset = command.parse(argv)
        processes.join(asked.machine)
        return launch(asked, preset)
    except UserError as error:
        print(f"error{processes.which()}: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if not jax.distributed.is_initialized():
            raise
        processes.abandon(error)
    except KeyboardInterrupt:
        print("\nstopped before the run began.")
        return exit_status(signal.SIGINT)


def launch(asked: NewRun | Resume, preset: str) -> int:
    """A new run, or the rest of an old one."""
    started = time.monotonic()
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not processes.is_first())
    keep_compiled_programs()
    folder, job = processes.in_turn(lambda: make_ready(asked, preset, console))
    folder = Path(processes.from_first(str(folder)))
    processes.check_same(repr((job.config, job.dataset.key, job.mesh.shape)))
    if isinstance(asked, NewRun):
        processes.in_turn(lambda: runs.create(folder, job.config, job.dataset))
    try:
        stopped_by = train(job, folder, console)
        processes.wait_for_all()
    except KeyboardInterrupt:  # the second one, or one outside of the loop
        stopped_by = signal.SIGINT
    if stopped_by:
        console.print(f"continue with\n  {runs.resume_command(folder)}")
        return exit_status(stopped_by)
    minutes = (time.monotonic() - started) / 60
    console.print(f"minutes          {minutes:.1f}\nfiles            {folder}")
    return 0


def open_run(asked: NewRun | Resume, preset: str) -> tuple[Path, RunConfig, str | None]:
    """The folder and configuration of a run, and the name of its data if it is an old one."""
    if isinstance(asked, Resume):
        return asked.resume, *runs.reopen(asked.resume)
    return runs.choose_folder(asked.config, preset), asked.config, None


def make_ready(asked: NewRun | Resume, preset: str, console: Console) -> tuple[Path, Job]:
    """The folder and the parts of a run; makes no arrays, and no folder of a run."""
    folder, config, data_key = open_run(asked, preset)
    configs.check(config)
    mesh = sharding.make_mesh(asked.machine.mesh, jax.devices())
    job = assemble(config, prepare(config.data, console.print), mesh)
    if data_key not in (None, job.dataset.key):
        raise UserError(
            f"the text is not the one that {folder} was trained on, so that resuming would "
            "give another run. Put the files back, or start anew."
        )
    return folder, job


def train(job: Job, folder: Path, console: Console) -> int:
    """Trains from the last checkpoint on and reports; the signal that came before the end, or 0."""
    outcome = execute(
        job,
        folder,
        Display(console, job.config.steps),
        lambda state, start: introduce(job, folder, state, start, console),
    )
    if outcome.stopped_by:
        console.print(f"\nstopped after step {outcome.step}; the run is saved.")
        return outcome.stopped_by
    sample = sample_text(job.program.extend, outcome.state, job.dataset.tokenizer, job.config)
    if processes.is_first():
        summary = write_results(folder, sample)
        console.print(f"\n{sample}\n", style="dim")
        console.print(summary)
    return 0


def introduce(job: Job, folder: Path, state: TrainState, start: int, console: Console) -> None:
    """Says what is about to be trained, on what, and where."""
    config, data = job.config, job.dataset
    size = sum(x.size for x in jax.tree.leaves(state.params))
    tokens_per_step = config.batch_size * config.model.context
    epochs = config.steps * config.batch_size / job.loader.n_windows
    lines = [
        optimizers.describe(config.optimizer, state.params),
        f"model  {size / 1e6:.2f} M parameters, {config.optimizer.name}",
        f"text   {data.train.meta.tokens:,} training and {data.val.meta.tokens:,} validation "
        f"tokens, {data.tokenizer.get_vocab_size()} in the vocabulary",
    ]
    if job.mesh.size > 1:
        lines.append(f"mesh   {sharding.describe(job.mesh)}")
        lines += [f"       {line}" for line in sharding.uncut(state.params, job.mesh)]
    lines.append(
        f"run    step {start} to {config.steps} of {tokens_per_step:,} tokens "
        f"({epochs:.2f} epochs), in {folder}"
    )
    console.print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
