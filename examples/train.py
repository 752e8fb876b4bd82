"""Pretrains a small GPT with Muon+: `python -m examples.train`, `--help` for more."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro
from rich.console import Console

from examples import config as configs
from examples import optimizers, runs
from examples.checkpoint import Checkpoints
from examples.config import RunConfig
from examples.data.prepare import cache_folder, prepare
from examples.errors import UserError
from examples.job import Job, assemble
from examples.loop import Loop
from examples.progress import Display
from examples.results import write_results
from examples.training import TrainState, abstract_state, first_state

PROGRAM = "python -m examples.train"
DESCRIPTION = f"""Pretrains a language model.

`{PROGRAM}` alone runs the preset {configs.DEFAULT_PRESET}; flags without a preset change that one.
`{PROGRAM} PRESET --help` lists the flags.
`{PROGRAM} --resume runs/NAME` continues a run that was stopped."""
INTERRUPTED = 130  # what a shell reports for a program that ended by Ctrl-C


@dataclass(frozen=True)
class Resume:
    """Continue a run that was stopped, with the configuration it began with."""

    resume: Path
    """Its folder."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        return launch(argv, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print("\nstopped before the run began.")
        return INTERRUPTED


def launch(argv: Sequence[str], console: Console) -> int:
    """A new run, or the rest of an old one."""
    started = time.monotonic()
    folder, config, data_key = open_run(argv)
    configs.check(config)
    keep_compiled_programs()
    job = assemble(config, prepare(config.data, console.print))
    if data_key is None:
        runs.create(folder, config, job.dataset.key)
    elif data_key != job.dataset.key:
        raise UserError(
            f"the text is not the one that {folder} was trained on, so that resuming would "
            "give another run. Put the files back, or start anew."
        )
    try:
        finished = train(job, folder, console)
    except KeyboardInterrupt:  # the second one, or one outside of the loop
        finished = False
    if not finished:
        console.print(f"continue with\n  {runs.resume_command(folder)}")
        return INTERRUPTED
    minutes = (time.monotonic() - started) / 60
    console.print(f"minutes          {minutes:.1f}\nfiles            {folder}")
    return 0


def open_run(argv: Sequence[str]) -> tuple[Path, RunConfig, str | None]:
    """The folder and configuration of a run, and the name of its data if it is an old one."""
    if any(word.split("=")[0] == "--resume" for word in argv):
        folder = tyro.cli(Resume, args=argv, prog=PROGRAM).resume
        return folder, *runs.reopen(folder)
    words = list(argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, configs.DEFAULT_PRESET)
    config = tyro.extras.overridable_config_cli(
        configs.PRESETS, args=words, prog=PROGRAM, description=DESCRIPTION
    )
    return runs.choose_folder(config, words[0]), config, None


def keep_compiled_programs() -> None:
    """Lets later runs load what this one compiles."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def train(job: Job, folder: Path, console: Console) -> bool:
    """Trains from the last checkpoint on and reports; False if Ctrl-C came before the end."""
    about = runs.about(job.config, job.dataset.key)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        start = checkpoints.latest_step()
        if start == 0:
            state = first_state(job.init)
        else:
            state = checkpoints.restore(start, abstract_state(job.init))
        introduce(job, folder, state, start, console)
        with runs.Metrics(folder / "metrics.jsonl", start) as metrics:
            loop = Loop(
                job=job,
                save=lambda step, state: checkpoints.save(step, state, about),
                metrics=metrics,
                display=Display(console, start, job.config.steps),
            )
            state, step = loop.run(state, start)
    if step < job.config.steps:
        console.print(f"\nstopped after step {step}; the run is saved.")
        return False
    sample, summary = write_results(job, folder, state.params)
    console.print(f"\n{sample}\n", style="dim")
    console.print(summary)
    return True


def introduce(job: Job, folder: Path, state: TrainState, start: int, console: Console) -> None:
    """Says what is about to be trained, and on what."""
    config, data = job.config, job.dataset
    size = sum(x.size for x in jax.tree.leaves(state.params))
    tokens_per_step = config.batch_size * config.model.context
    epochs = config.steps * config.batch_size / job.loader.n_windows
    console.print(
        f"{optimizers.describe(config.optimizer, state.params)}\n"
        f"model  {size / 1e6:.2f} M parameters, {config.optimizer.name}\n"
        f"text   {data.train.meta.tokens:,} training and {data.val.meta.tokens:,} validation "
        f"tokens, {data.tokenizer.get_vocab_size()} in the vocabulary\n"
        f"run    step {start} to {config.steps} of {tokens_per_step:,} tokens "
        f"({epochs:.2f} epochs), in {folder}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
