"""Loads the model of a run from its folder, and scores tokens with it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import optax
import tyro
from tokenizers import Tokenizer

from examples.trainer.data.loader import place_rows
from examples.trainer.models.language_model import Forward
from examples.trainer.runs import folder
from examples.trainer.runs.checkpoint import restore_parts
from examples.trainer.settings.run import RunConfig
from examples.trainer.training import sharding
from examples.trainer.training.loss import Scores, token_scores
from examples.trainer.training.step import make_forward, make_init_params, on_targets


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

    @functools.cached_property
    def token_scores(self) -> Callable[..., Scores]:
        words = self.tokenizer.get_vocab_size()
        scores = on_targets(token_scores, self.config.model, words, self.mesh)
        return jax.jit(scores, out_shardings=sharding.replicated(self.mesh))

    def key(self, seed: int) -> jax.Array:
        """A random key where the parameters are, as sampling wants it."""
        return jax.device_put(jax.random.key(seed), sharding.replicated(self.mesh))


def load(checkpoint: CheckpointRef) -> TrainedModel:
    """Reads the parameters of a checkpoint onto a mesh, and nothing else of it."""
    config, data_key = folder.read_config(checkpoint.run)
    tokenizer = folder.read_tokenizer(checkpoint.run)
    metadata = folder.metadata_of(checkpoint.run, config, data_key)
    # The run may have asked for a kernel that this machine lacks.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="auto"))
    mesh = sharding.make_mesh(checkpoint.mesh, jax.devices())
    vocab_size = tokenizer.get_vocab_size()
    shapes = jax.eval_shape(make_init_params(config.model, vocab_size), 0)
    abstract = sharding.abstract(shapes, sharding.of_params(shapes, mesh))
    place = checkpoint.run / "checkpoints"
    step, found = restore_parts(place, checkpoint.step, {"params": abstract}, metadata)
    params = found["params"]
    forward = make_forward(config.model, vocab_size, mesh)
    return TrainedModel(config, tokenizer, mesh, step, params, forward)


SHORTEST = 16  # tokens; shorter rows are padded to this, so that few lengths are compiled

RowScores = tuple[np.ndarray, np.ndarray]
"""For each token of a row after the first: nats, and whether no other token was likelier."""


def score(model: TrainedModel, rows: Sequence[Sequence[int]], batch_size: int) -> list[RowScores]:
    """The scores of rows of at most context + 1 tokens, in the order of the rows."""
    shards = sharding.shard_count(model.mesh, sharding.RULES["batch"])
    batch_size = -(-batch_size // shards) * shards
    # Rows of similar length form a batch, since a batch is as long as its longest row.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    scores: list[RowScores | None] = [None] * len(rows)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        longest = max(len(rows[i]) for i in chosen) - 1
        length = min(max(SHORTEST, 2 ** math.ceil(math.log2(longest))), model.config.model.context)
        padded = np.zeros((batch_size, length + 1), np.int32)
        for line, i in zip(padded, chosen, strict=False):
            line[: len(rows[i])] = rows[i]
        inputs, targets = (
            place_rows(part, sharding.of_batch(model.mesh))
            for part in (padded[:, :-1], padded[:, 1:])
        )
        nats, hits = map(np.asarray, model.token_scores(model.params, inputs, targets))
        for line, i in enumerate(chosen):
            n = len(rows[i]) - 1
            scores[i] = nats[line, :n].astype(np.float64), hits[line, :n]
    return [one for one in scores if one is not None]


def windows(ids: Sequence[int], context: int) -> list[Sequence[int]]:
    """Rows in which each token after the first is a target exactly once."""
    return [ids[start : start + context + 1] for start in range(0, len(ids) - 1, context)]
