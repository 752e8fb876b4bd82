"""Reads the parameters of a model from a folder in Hugging Face's form onto a mesh."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from examples.trainer.models import state_dict
from examples.trainer.settings import hugging_face
from examples.trainer.settings.hugging_face import check_same_network, find_weights
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system.errors import UserError
from examples.trainer.weights import tensors
from examples.trainer.weights.names import published


def check(name: str, config: ModelConfig, vocab_size: int) -> None:
    """Refuses weights that do not fit the settings; reads the names and shapes only."""
    folder = find_weights(name)
    check_same_network(name, folder, config)
    words = hugging_face.vocabulary(folder)
    if words != vocab_size:
        raise UserError(
            f"{folder / hugging_face.CONFIG}: vocab_size is {words}, and the tokenizer of the run"
            f" has {vocab_size} tokens: give the one of these weights as --data.tokenizer PATH."
        )
    with_file_named(folder, lambda found: state_dict.check(found, config, vocab_size), config)


def load(name: str, config: ModelConfig, vocab_size: int, like: Any) -> optax.Params:
    """The parameters, read array by array, with the shardings of the tree `like`."""

    def placed(path: Any, array: np.ndarray) -> jax.Array:
        leaf = like
        for key in path:
            leaf = leaf[key.key if hasattr(key, "key") else key.idx]
        return jax.make_array_from_callback(array.shape, leaf.sharding, lambda index: array[index])

    folder = find_weights(name)
    check_same_network(name, folder, config)
    return with_file_named(
        folder,
        lambda found: state_dict.from_state_dict(found, config, vocab_size, placed),
        config,
    )


def with_file_named(folder: Path, work: Any, config: ModelConfig) -> Any:
    """`work` on the arrays of a folder; its errors name the folder."""
    found = published(tensors.open_folder(folder), config)
    try:
        return work(found)
    except UserError as error:
        raise UserError(f"the weights in {folder}: {error}") from None
