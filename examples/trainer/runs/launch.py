"""Starts or resumes a run: chooses its folder, trains, and reports."""

import math
import os
import signal
import time
from pathlib import Path

import jax
from rich.console import Console

from examples.trainer.data.prepare import cache_folder, prepare
from examples.trainer.data.tokenizer import end_of, ids_of
from examples.trainer.models import attention
from examples.trainer.models.layers import Layout
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import processes, tracker
from examples.trainer.runs.folder import only_writer
from examples.trainer.runs.loop import execute
from examples.trainer.runs.progress import Display
from examples.trainer.runs.report import sample_text, write_results
from examples.trainer.runs.tracker import Tracker
from examples.trainer.settings import validation
from examples.trainer.settings.command_line import NewRun, Resume, read_config_file
from examples.trainer.settings.machines import MachineConfig
from examples.trainer.settings.presets import PRESETS, as_published
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system import exit_status, files
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.program import TrainingSetup, check_settings, make_setup
from examples.trainer.training.step import TrainState


def keep_compiled_programs() -> None:
    """Stores compiled programs, so that later processes can load them."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def start(asked: NewRun | Resume, preset: str) -> tuple[int, Path]:
    """Does a new run, or the rest of an earlier one; returns the exit status and the folder."""
    started = time.monotonic()
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not processes.is_first())
    keep_compiled_programs()
    folder, setup = processes.first_then_others(lambda: setup_run(asked, preset, console))
    folder = Path(processes.from_first(str(folder)))
    processes.check_same(repr((setup.config, setup.dataset.key, setup.mesh.shape)))
    processes.connect(setup.mesh)
    if isinstance(asked, NewRun):
        folder = processes.first_then_others(lambda: make_folder(folder, setup, preset))
        folder = Path(processes.from_first(str(folder)))
    again = run_folder.resume_command(folder, asked.machine.mesh)
    resume = f"continue with\n  {again}"
    try:
        with files.explained(f"a file of {folder}", "use", f"Then {resume}"):
            with only_writer(folder, console.print):
                stopped_by = train(setup, folder, console, asked.machine)
            processes.wait_for_all()
    except KeyboardInterrupt:  # a second Ctrl-C, or one outside the loop
        console.print(f"\nended at once; checkpoints that were complete are kept. {resume}")
        if jax.process_count() > 1:  # they cannot agree on anything any more
            exit_status.leave_at_once(exit_status.of_signal(signal.SIGINT))
        return exit_status.of_signal(signal.SIGINT), folder
    if stopped_by:
        console.print(resume)
        return exit_status.of_signal(stopped_by), folder
    minutes = (time.monotonic() - started) / 60
    console.print(f"minutes          {minutes:.1f}\nfiles            {folder}")
    return 0, folder


def setup_run(asked: NewRun | Resume, preset: str, console: Console) -> tuple[Path, TrainingSetup]:
    """The folder and the setup of a run; makes no arrays, and does not create the folder."""
    if isinstance(asked, NewRun):
        folder, config, data_key = run_folder.choose_folder(asked.config, preset), asked.config, ""
        check_config(config)
        optimizers.check_taken(config.optimizer, before_flags(asked, preset), [config.optimizer])
    else:
        folder = asked.resume
        config, data_key = run_folder.read_config(folder)
        try:
            check_config(config)
        except UserError as error:
            raise UserError(f"{folder / run_folder.CONFIG}: {error}") from None
        config = run_folder.lengthened(folder, config, asked.steps)
        run_folder.read_tokenizer(folder)  # refuses one whose digest cannot be compared
    validation.check(asked.machine)
    list(map(tracker.package_of, asked.machine.tracker))  # refused before the run, not in it
    mesh = sharding.make_mesh(asked.machine.mesh, jax.devices())
    setup = make_setup(config, prepare(config.data, console.print), mesh)
    words = setup.dataset.tokenizer  # what it cannot do is refused before the run, not after it
    end_of(words)
    ids_of(words, [config.prompt])
    if data_key not in ("", setup.dataset.key):
        raise UserError(
            f"the text is not the one that {folder} was trained on, so that resuming would "
            "give another run. Put the files back, or start a new run."
        )
    return folder, setup


def make_folder(folder: Path, setup: TrainingSetup, preset: str) -> Path:
    """Makes the folder of a new run, without --name another if one has been made there since."""
    config = setup.config
    while True:
        try:
            run_folder.create(folder, config, setup.dataset)
            return folder
        except UserError:
            if config.name or not folder.exists():
                raise
        folder = run_folder.choose_folder(config, preset)


def check_config(config: RunConfig) -> None:
    """Refuses what no run can have, before a text is read."""
    check_settings(config)


def before_flags(asked: NewRun, preset: str) -> OptimizerConfig:
    """The update rule that the flags of a new run change."""
    config = PRESETS[preset][1]
    if asked.file:
        config = read_config_file(asked.file, config)
    if asked.as_published:
        config = as_published(preset, config)
    return config.optimizer


def train(setup: TrainingSetup, folder: Path, console: Console, machine: MachineConfig) -> int:
    """Trains from the last checkpoint on and reports; the signal that stopped it, or 0."""
    config, tokenizer = setup.config, setup.dataset.tokenizer
    display = Display(console, config.steps)
    asked = dict.fromkeys(machine.tracker) if processes.is_first() else ()
    trackers = [Tracker(name, folder, config, console.print) for name in asked]
    outcome = execute(
        setup,
        folder,
        [display, *trackers],
        lambda state, start: describe_setup(setup, folder, state, start, console),
        console.print,
    )
    state = outcome.state
    if outcome.stopped_by:
        console.print(f"\nstopped after step {outcome.step}; the run is saved.")
        return outcome.stopped_by
    sample = sample_text(
        setup.program.forward,
        state.params,
        tokenizer,
        config.prompt,
        config.sample_tokens,
        config.model,
        state.key,
    )
    found = processes.together(lambda: report(folder, sample, console))
    last = float(processes.from_first(str(found)))
    if not math.isfinite(last):
        raise UserError(
            f"the run is finished, but its last validation loss is {last}: its parameters are of "
            "no use. Start again with a lower --optimizer.learning-rate or "
            "--optimizer.adam-learning-rate."
        )
    return 0


def report(folder: Path, sample: str, console: Console) -> float | None:
    if not processes.is_first():
        return None
    summary, last = write_results(folder, sample)
    console.print(f"\n{sample}\n", style="dim")
    console.print(summary)
    return last


def describe_setup(
    setup: TrainingSetup, folder: Path, state: TrainState, start: int, console: Console
) -> None:
    config, data = setup.config, setup.dataset
    tokens = data.tokenizer.get_vocab_size()
    size = sum(x.size for x in jax.tree.leaves(state.params))
    tokens_per_step = config.batch_size * config.model.context
    epochs = setup.loader.epochs(config.steps)
    table = optimizers.describe(config.optimizer, state.params)
    lines = [
        table,
        f"model  {size / 1e6:.2f} M parameters, {config.optimizer.name}, "
        f"{attention.describe(config.model, Layout(setup.mesh))}",
        f"text   {len(data.train.ids):,} training and {len(data.val.ids):,} validation "
        f"tokens, {tokens} in the vocabulary",
    ]
    if setup.mesh.size > 1:
        lines.append(f"mesh   {sharding.describe(setup.mesh)}")
        lines += [f"       {line}" for line in sharding.undivided(state.params, setup.mesh)]
    lines.append(
        f"run    step {start} to {config.steps} of {tokens_per_step:,} tokens "
        f"({epochs:.2f} epochs), in {folder}"
    )
    console.print("\n".join(lines))
