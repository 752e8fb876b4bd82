"""The model of a run from its folder, weights that a run begins from, and tokens of a model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.typing import ArrayLike
from tokenizers import Tokenizer

from examples.trainer.models import sharding
from examples.trainer.models.state_dict import from_state_dict, to_state_dict
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs.checkpoint import restore_params
from examples.trainer.settings import validation
from examples.trainer.settings.run import ModelConfig, RunConfig
from examples.trainer.settings.validation import Count, NotNegative
from examples.trainer.system.errors import UserError
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
    config, _ = run_folder.read_config(checkpoint.run)
    tokenizer = run_folder.read_tokenizer(checkpoint.run)
    metadata = run_folder.metadata_of(checkpoint.run, config)
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


# Weights that a run begins from: --init-from

OWN = ("compute_dtype", "param_dtype", "attention", "remat", "scan")
"""The settings of a network that do not say which one it is."""


def with_network(config: RunConfig) -> RunConfig:
    """The settings of a run, with the network and the tokenizer of the weights it begins from."""
    folder, words = Path(config.init_from), str(Path(config.init_from) / run_folder.TOKENIZER)
    if config.data.tokenizer not in ("", words):
        raise UserError(f"--data.tokenizer: the weights of --init-from {folder} have their own.")
    own = {name: getattr(config.model, name) for name in OWN}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(network_of(folder), **own),
        data=dataclasses.replace(config.data, tokenizer=words),
    )


def network_of(folder: Path) -> ModelConfig:
    if is_run(folder):
        return run_folder.read_config(folder)[0].model
    from examples import export  # which reads runs

    return export.read_network(folder)


def is_run(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir()


def load_weights(folder: Path, config: ModelConfig, vocab_size: int) -> optax.Params:
    """The parameters of a folder as a network of this form has them, as NumPy arrays."""
    return from_state_dict(state_dict_of(folder), config, vocab_size)


def state_dict_of(folder: Path) -> Mapping[str, np.ndarray]:
    if not is_run(folder):
        from examples import export

        return export.read_weights(folder)
    if jax.process_count() > 1:
        raise UserError(f"--init-from {folder}: several processes begin from an exported folder.")
    model = load(CheckpointRef(folder))
    return to_state_dict(jax.device_get(model.params), model.config.model)


# Text: each new token is drawn after a pass over the last ones


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: NotNegative = 0.8
    """Below 1 sharpens the model's distribution; 0 always takes the likeliest token."""
    top_k: Count = 50
    """Number of likeliest tokens to draw from."""


DEFAULT = Sampling()


def sample_ids(
    forward: Forward,
    params: optax.Params,
    ids: Sequence[int],
    n_new: int,
    model: ModelConfig,
    key: jax.Array,
    sampling: Sampling = DEFAULT,
) -> list[int]:
    """`n_new` ids that follow `ids`; compiles one program, whatever the lengths."""
    validation.check(sampling)
    draw, text = make_draw(forward, key.sharding, sampling), list(ids)
    for i in range(n_new):
        seen = text[-model.context :]
        window = np.zeros((1, model.context), np.int32)
        window[0, : len(seen)] = seen
        text.append(int(draw(params, window, len(seen), jax.random.fold_in(key, i))))
    return text[len(ids) :]


@functools.lru_cache(maxsize=2)  # several texts are often sampled from one model
def make_draw(forward: Forward, replicated: Any, sampling: Sampling) -> Callable[..., jax.Array]:
    """A compiled function to the token after the first `length` ones of a window (1, T).

    The token has the sharding `replicated`, so that each process can read it.
    """

    @functools.partial(jax.jit, out_shardings=replicated)
    def draw(
        params: optax.Params, window: ArrayLike, length: ArrayLike, key: jax.Array
    ) -> jax.Array:
        # No earlier token sees the padding after `length`.
        logits = forward(params, window)[0, jnp.asarray(length) - 1]
        best, tokens = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[0]))
        if sampling.temperature == 0:
            return tokens[0]
        return tokens[jax.random.categorical(key, best / sampling.temperature)]

    return draw
