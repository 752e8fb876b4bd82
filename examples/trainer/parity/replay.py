"""Repeats a recorded training with the trainer's own model, loss, step and optimizer."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from examples.trainer.models.published_names import Family
from examples.trainer.models.state_dict import from_state_dict, sizes_of
from examples.trainer.parity.recording import Recording
from examples.trainer.settings.model import ModelConfig, head_size
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.model_function import make_forward
from examples.trainer.training.program import make_program
from examples.trainer.training.step import shardings_of


class Model(NamedTuple):
    """A model of a recording."""

    config: ModelConfig
    vocab_size: int
    params: optax.Params
    """Before the first step, as NumPy arrays."""


def load(path: Path, recording: Recording, family: Family, n_head: int) -> Model:
    """The model of a family; raises `UserError` for arrays that cannot be of one model."""
    recorded = recording.families[family]
    try:
        config, words = sizes_of(recorded.init, family, n_head, recording.inputs.shape[-1])
        check_heads(config)
        params = from_state_dict(recorded.init, config, words)
    except UserError as error:
        raise UserError(f"{path}, {family}: {error}") from None
    largest = max(recording.inputs.max(), recording.targets.max())
    least = min(recording.inputs.min(), recording.targets.min())
    if not 0 <= least <= largest < words:
        raise UserError(
            f"{path}, {family}: the tokens go from {least} to {largest}, and the embedding has "
            f"{words} rows: give the parameters of a model of these tokens."
        )
    if recording.inputs.shape[-1] > config.context:
        raise UserError(
            f"{path}, {family}: rows have {recording.inputs.shape[-1]} tokens, and the model has "
            f"{config.context} positions: give shorter rows, or more positions."
        )
    if recorded.logits.shape[-1] != words:
        raise UserError(
            f"{path}, {family}: there are logits of {recorded.logits.shape[-1]} words, and the "
            f"embedding has {words} rows: give the logits of this model."
        )
    return Model(config, words, params)


def check_heads(config: ModelConfig) -> None:
    if config.d_model % config.n_head:
        raise UserError(
            f"--heads {config.n_head} does not divide the width {config.d_model}: give the number "
            "of heads of the model that was trained."
        )
    if config.family == "llama" and head_size(config) % 2:
        raise UserError(
            f"--heads {config.n_head} makes heads of {head_size(config)} numbers, and llama "
            "rotates them in pairs: give the number of heads of the model that was trained."
        )


def logits(model: Model, tokens: np.ndarray) -> np.ndarray:
    """The logits of tokens (row, token) before the first step."""
    forward = make_forward(model.config, model.vocab_size, one_device())
    found, _ = jax.jit(forward)(model.params, tokens.astype(np.int32), None, 0)
    return np.asarray(found)


def losses(recording: Recording, model: Model, optimizer: OptimizerConfig) -> np.ndarray:
    """The loss of each step of a training; NaN for a step that was skipped."""
    steps, micro_batches, _, length = recording.inputs.shape
    program = make_program(
        model=model.config,
        rule=dataclasses.replace(optimizer, learning_rate=0.0, adam_learning_rate=0.0),
        steps=steps,
        accumulate=micro_batches,
        vocab_size=model.vocab_size,
        mesh=one_device(),
    )
    params = jax.tree.map(jnp.array, model.params)  # a copy, since a step reuses its memory
    placed = jax.device_put(params, shardings_of(program.abstract.params))
    state = program.begin(placed, 0)
    found = []
    for inputs, targets in zip(recording.inputs, recording.targets, strict=True):
        rows = (x.reshape(-1, length).astype(np.int32) for x in (inputs, targets))
        state, measured = program.train_step(state, optimizers.rates(optimizer), *rows)
        found.append(measured.loss)
    return np.array(jax.device_get(found))


def one_device() -> Mesh:
    return sharding.make_mesh("", jax.devices()[:1])
