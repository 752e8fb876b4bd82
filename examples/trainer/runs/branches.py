"""Runs that go on: `--from-run RUN:STEP --name NEW`, and longer ones: `--resume RUN --steps N`."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.trainer.runs import checkpoint
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.checkpoint import restore_parts
from examples.trainer.settings.command_line import Resume, origin
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers
from examples.trainer.training.program import TrainingSetup, program_of
from examples.trainer.training.step import TrainState


def resolve_branch(config: RunConfig) -> RunConfig:
    """The configuration with the step in `from_run`, whatever that run does later."""
    if not config.name:
        raise UserError("--from-run makes a new run: give it a name with --name.")
    run, step = origin(config.from_run)
    theirs, _ = reopen_origin(config, run)
    place = checkpoint.place_of(run, theirs)
    step = checkpoint.chosen(checkpoint.saved_steps(place), step, place)
    if step >= config.steps:
        raise UserError(
            f"--from-run {run}:{step} with --steps {config.steps} leaves nothing to train: give a"
            " larger --steps."
        )
    return dataclasses.replace(config, from_run=f"{run}:{step}")


def reopen_origin(config: RunConfig, run: Path) -> tuple[RunConfig, str]:
    """The settings of the other run, whose checkpoints are in its folder or beside the new ones."""
    return run_folder.reopen(run, "", config.checkpoint_dir)


def check_branch(setup: TrainingSetup) -> None:
    """Refuses another tokenizer, and flags that change the arrays of the state."""
    run, _ = origin(setup.config.from_run)
    theirs, _ = reopen_origin(setup.config, run)
    words = run_folder.read_tokenizer(run)
    if words.to_str() != setup.dataset.tokenizer.to_str():
        raise UserError(
            f"the tokenizer of this text is not that of {run}: give"
            f" --data.tokenizer {run / run_folder.TOKENIZER}."
        )
    program = program_of(theirs, words.get_vocab_size(), setup.mesh)
    before, now = (arrays(each) for each in (program.abstract, setup.program.abstract))
    if before != now:
        changed = {name for name, _ in before.items() ^ now.items()}
        other = min(changed, key=lambda name: ("opt_state" in name, name))
        raise UserError(
            f"the state of {run} does not fit the flags: {other} differs. Leave out those that"
            " change the network or the kind of optimizer."
        )


def arrays(state: Any) -> dict[str, str]:
    named = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{x.dtype}{x.shape}" for path, x in named}


def init_from_origin(setup: TrainingSetup) -> tuple[TrainState, int]:
    """The state after a step of the other run, with a key of this one, and that step."""
    abstract = setup.program.abstract
    run, step = origin(setup.config.from_run)
    theirs, data_key = reopen_origin(setup.config, run)
    metadata = run_folder.metadata_of(run, theirs, data_key)
    parts = {"params": abstract.params, "opt_state": abstract.opt_state}
    step, found = restore_parts(checkpoint.place_of(run, theirs), step, parts, metadata)
    make_key = functools.partial(jax.random.key, setup.config.seed)
    key = jax.jit(make_key, out_shardings=abstract.key.sharding)()
    return TrainState(found["params"], found["opt_state"], key), step


def extended(config: RunConfig, asked: Resume, say: Callable[[str], None]) -> RunConfig:
    """The configuration with the steps that were asked for; says what becomes of the rate."""
    if asked.steps is None:
        if asked.extend != "stretch":
            raise UserError("--extend goes with --steps: give the new number of steps.")
        return config
    if asked.steps <= config.steps:
        raise UserError(
            f"{asked.resume} has {config.steps} steps, and --steps {asked.steps} is no more: give a"
            " larger number, or none to continue it."
        )
    step = max(checkpoint.saved_steps(checkpoint.place_of(asked.resume, config)), default=0)
    rule = config.optimizer
    if asked.extend == "again":
        rule = dataclasses.replace(rule, schedule_from=step)
    longer = dataclasses.replace(
        config,
        steps=asked.steps,
        optimizer=rule,
        earlier_steps=(*config.earlier_steps, config.steps),
    )
    before, after = (rate_at(each, step) for each in (config, longer))
    say(
        f"extended from {config.steps} to {asked.steps} steps, from step {step} on with"
        f" --extend {asked.extend}: the rate of the matrices goes from {before:.3g} to {after:.3g}"
    )
    return longer


def rate_at(config: RunConfig, step: int) -> float:
    rule = config.optimizer
    rate = optimizers.schedule(rule, optimizers.rates(rule).matrices, config.steps)
    return float(jnp.asarray(rate(step)))
