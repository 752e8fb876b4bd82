"""Loads the model of a run from its folder."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import optax
import tyro
from tokenizers import Tokenizer

from examples.trainer.models import sharding
from examples.trainer.runs import folder
from examples.trainer.runs.checkpoint import restore_params
from examples.trainer.settings.run import RunConfig
from examples.trainer.training.step import Forward, make_forward, make_init_params


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint of a run, and the mesh to load it on."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run."""
    step: int | None = None
    """Step of the checkpoint; the last one by default."""
    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4; empty: all of them on fsdp."""


@dataclass(frozen=True)
class TrainedModel:
    """A model with its parameters."""

    config: RunConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    step: int
    params: optax.Params
    forward: Forward

    def key(self, seed: int) -> jax.Array:
        """A random key where the parameters are, as sampling wants it."""
        return jax.device_put(jax.random.key(seed), sharding.replicated(self.mesh))


def load(checkpoint: CheckpointRef) -> TrainedModel:
    """Reads the parameters of a checkpoint onto a mesh, and nothing else of it."""
    config, _ = folder.read_config(checkpoint.run)
    tokenizer = folder.read_tokenizer(checkpoint.run)
    metadata = folder.metadata_of(checkpoint.run, config)
    # The run may have asked for a kernel that this machine lacks.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="auto"))
    mesh = sharding.make_mesh(checkpoint.mesh, jax.devices())
    vocab_size = tokenizer.get_vocab_size()
    shapes = jax.eval_shape(make_init_params(config.model, vocab_size), 0)
    abstract = sharding.abstract(shapes, sharding.of_params(shapes, mesh))
    place = checkpoint.run / "checkpoints"
    step, params = restore_params(place, checkpoint.step, abstract, metadata)
    forward = make_forward(config.model, vocab_size, mesh)
    return TrainedModel(config, tokenizer, mesh, step, params, forward)
