"""Starts or resumes a run: chooses its folder, trains, and reports."""

import dataclasses
import math
import os
import signal
import time
from pathlib import Path

import jax
from rich.console import Console

from examples.trainer.data.prepare import cache_folder, prepare
from examples.trainer.data.tokenizer import end_of
from examples.trainer.models import blocks, sharding
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import processes, report
from examples.trainer.runs.loop import Run, execute, make_run
from examples.trainer.runs.metrics import Display, Tracker, package_of
from examples.trainer.runs.trained import TrainedModel
from examples.trainer.settings import validation
from examples.trainer.settings.command_line import NewRun, Resume
from examples.trainer.settings.run import DEFAULT_RATES, TITLES, MachineConfig, RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers
from examples.trainer.training.step import make_functions


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
    run = processes.first_then_others(lambda: setup_run(asked, preset, console))
    processes.check_same(repr((run.config, run.dataset.key, run.mesh.shape)))
    folder = asked.resume if isinstance(asked, Resume) else Path()
    if isinstance(asked, NewRun) and processes.is_first():
        folder = run_folder.create(run.config, preset, run.dataset)
    folder = Path(processes.from_first(str(folder)))
    run_folder.check_shared(folder)
    resume = f"continue with\n  {run_folder.resume_command(folder, asked.machine.mesh)}"
    try:
        with run_folder.only_writer(folder):
            stopped_by = train(run, folder, console, asked.machine)
    except KeyboardInterrupt:  # a second Ctrl-C, or one outside the loop
        console.print(f"\nended at once; checkpoints that were complete are kept. {resume}")
        return 128 + signal.SIGINT, folder
    if stopped_by:
        console.print(resume)
        return 128 + stopped_by, folder
    minutes = (time.monotonic() - started) / 60
    console.print(f"minutes          {minutes:.1f}\nfiles            {folder}")
    return 0, folder


def check_settings(config: RunConfig) -> None:
    """Refuses settings that make no sense, by the names of their flags; builds nothing."""
    validation.check(config)
    optimizers.check(config.optimizer)


def setup_run(asked: NewRun | Resume, preset: str, console: Console) -> Run:
    """The setup of a run; makes no arrays, and does not create the folder."""
    if isinstance(asked, NewRun):
        config, data_key = asked.config, ""
        check_settings(config)
        if config.init_from:
            from examples import weights  # which reads runs

            config = weights.with_network(config)
        run_folder.names(config, preset)  # a name that is taken is refused before a text is read
    else:
        config, data_key = run_folder.read_config(asked.resume)
        config = run_folder.lengthened(asked.resume, config, asked.steps)
        check_settings(config)
    validation.check(asked.machine)
    list(map(package_of, asked.machine.tracker))  # refused before the run, not in it
    mesh = sharding.make_mesh(asked.machine.mesh, jax.devices())
    run = make_run(config, prepare(config.data, console.print), mesh, make_functions)
    end_of(run.dataset.tokenizer)  # the sample begins with it: refused before the run, not after
    if isinstance(asked, Resume) and data_key != run.dataset.key:
        raise UserError(
            f"the text is not the one that {asked.resume} was trained on, so that resuming would "
            "give another run. Put the files back, or start a new run."
        )
    return run


def train(run: Run, folder: Path, console: Console, machine: MachineConfig) -> int:
    """Trains from the last checkpoint on and reports; the signal that stopped it, or 0."""
    config = run.config
    asked = dict.fromkeys(machine.tracker) if processes.is_first() else ()
    trackers = [Tracker(name, folder, config, console.print) for name in asked]
    console.print(describe(run, folder))
    observers = [Display(console, config.steps), *trackers]
    state, step, stopped_by = execute(run, folder, observers, machine.profile)
    if stopped_by:
        console.print(f"\nstopped after step {step}; the run is saved.")
        return stopped_by
    model = TrainedModel(
        config, run.dataset.tokenizer, run.mesh, step, state.params, run.functions.forward
    )
    sample = model.text(config.prompt, config.sample_tokens, state.key)
    if processes.is_first():
        summary, last = report.write_results(folder, sample)
        console.print(f"\n{sample}\n", style="dim")
        console.print(summary)
        if not math.isfinite(last):
            raise UserError(
                f"the run is finished, but its last validation loss is {last}: its parameters are "
                "of no use. Start again with a lower --optimizer.learning-rate or "
                "--optimizer.adam-learning-rate."
            )
    return 0


def describe(run: Run, folder: Path) -> str:
    config, data, params = run.config, run.dataset, run.functions.abstract.params
    epochs = config.steps * config.batch_size / run.loader.n_windows
    size = sum(x.size for x in jax.tree.leaves(params))
    lines = [
        optimizers.describe(config.optimizer, params, run.mesh),
        f"model  {size / 1e6:.2f} M parameters, {config.optimizer.name}, "
        f"{blocks.choose(config.model, run.mesh.devices.flat[0].platform)} attention",
        f"text   {len(data.train.ids):,} training and {len(data.val.ids):,} validation "
        f"tokens, {data.tokenizer.get_vocab_size()} in the vocabulary",
    ]
    if run.mesh.size > 1:
        lines.append(f"mesh   {sharding.describe(run.mesh)}")
    if config.model.n_head % run.mesh.shape["tensor"]:
        lines.append(
            f"mesh   tensor={run.mesh.shape['tensor']} does not divide --model.n-head "
            f"{config.model.n_head}: each of its devices computes all heads"
        )
    lines.append(
        f"run    {config.steps} steps of {config.batch_size * config.model.context:,} tokens "
        f"({epochs:.2f} epochs), in {folder}"
    )
    return "\n".join(lines)


def compare(asked: NewRun, preset: str) -> int:
    """`--against RULE`: the same run with another update rule too, and the curves of both."""
    rule, against = asked.config.optimizer, asked.against
    if against is None or against == rule.name:
        raise UserError(f"--against {against}: the run itself has that rule; give another one.")
    name = f"{asked.config.name}-{against}" if asked.config.name else ""
    rate = asked.against_rate
    if rate is None and DEFAULT_RATES[rule.name] == DEFAULT_RATES[against]:
        rate = rule.learning_rate
    changed = dataclasses.replace(rule, name=against, learning_rate=rate)
    configs = (asked.config, dataclasses.replace(asked.config, name=name, optimizer=changed))
    folders = []
    for config in configs:
        status, folder = start(dataclasses.replace(asked, config=config), preset)
        if status:
            return status
        folders.append(folder)
    if processes.is_first():
        one, other = (
            f"{TITLES[x.name]} at {optimizers.rates(x).matrices:g}" for x in (rule, changed)
        )
        print(report.compare(folders, (one, other)))
    return 0
