"""Runs that go on from a checkpoint of another run: `--from-run RUN:STEP --name NEW`."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax

from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import places
from examples.trainer.runs.checkpoint import restore_parts
from examples.trainer.settings.command_line import origin
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training.program import TrainingSetup, make_program
from examples.trainer.training.step import TrainState


def first_step(config: RunConfig) -> int:
    """The step after which a run begins: 0, or that of the checkpoint of another run."""
    return origin(config.from_run)[1] or 0 if config.from_run else 0


def resolved(config: RunConfig) -> RunConfig:
    """The configuration with the step in `from_run`, whatever that run does later."""
    if not config.from_run:
        return config
    if not config.name:
        raise UserError("--from-run makes a new run: give it a name with --name.")
    run, step = origin(config.from_run)
    theirs, _ = reopen(config, run)
    there = places.saved_steps(places.checkpoints(run, theirs))
    step = max(there, default=0) if step is None else step
    if step not in there:
        raise UserError(
            f"--from-run {config.from_run}: there is no checkpoint of that step, but of"
            f" {', '.join(map(str, there)) or 'none'}; a run keeps its last two."
        )
    if step >= config.steps:
        raise UserError(
            f"--from-run {run}:{step} with --steps {config.steps} leaves nothing to train: give a"
            " larger --steps."
        )
    return dataclasses.replace(config, from_run=f"{run}:{step}")


def reopen(config: RunConfig, run: Path) -> tuple[RunConfig, str]:
    """The settings of the other run, whose checkpoints are in its folder or beside the new ones."""
    return run_folder.reopen(run, "", config.checkpoint_dir)


def check(setup: TrainingSetup) -> None:
    """Refuses another tokenizer, and flags that change the arrays of the state."""
    run, _ = origin(setup.config.from_run)
    theirs, _ = reopen(setup.config, run)
    words = run_folder.read_tokenizer(run)
    if words.to_str() != setup.dataset.tokenizer.to_str():
        raise UserError(
            f"the tokenizer of this text is not that of {run}: give"
            f" --data.tokenizer {run / run_folder.TOKENIZER}."
        )
    program = make_program(
        model=theirs.model,
        rule=dataclasses.replace(theirs.optimizer, learning_rate=0.0, adam_learning_rate=0.0),
        steps=theirs.steps,
        accumulate=theirs.accumulate,
        vocab_size=words.get_vocab_size(),
        mesh=setup.mesh,
    )
    before, now = (arrays(each) for each in (program.abstract, setup.program.abstract))
    if before != now:
        changed = {name for name, _ in before.items() ^ now.items()}
        other = min(changed, key=lambda name: ("opt_state" in name, name))
        raise UserError(
            f"the state of {run} does not fit the flags: {other} differs. Leave out those that"
            " change the network or the kind of optimizer, or begin with its weights alone: export"
            " them, and give --init-from."
        )


def arrays(state: Any) -> dict[str, str]:
    named = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{x.dtype}{x.shape}" for path, x in named}


def state_of(setup: TrainingSetup) -> TrainState:
    """The parameters and the state of the optimizer of the other run, with a key of this one."""
    abstract = setup.program.abstract
    run, step = origin(setup.config.from_run)
    theirs, data_key = reopen(setup.config, run)
    metadata = run_folder.metadata_of(run, theirs, data_key)
    parts = {"params": abstract.params, "opt_state": abstract.opt_state}
    _, found = restore_parts(places.checkpoints(run, theirs), step, parts, metadata)
    make_key = functools.partial(jax.random.key, setup.config.seed)
    key = jax.jit(make_key, out_shardings=abstract.key.sharding)()
    return TrainState(found["params"], found["opt_state"], key)
