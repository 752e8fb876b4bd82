"""Weights that a run begins from (--init-from): those of another run, or of an exported folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import optax

from examples.trainer.models.state_dict import from_state_dict, to_state_dict
from examples.trainer.runs import folder as run_folder
from examples.trainer.runs import trained
from examples.trainer.runs.trained import CheckpointRef
from examples.trainer.settings.run import ModelConfig, RunConfig
from examples.trainer.system.errors import UserError

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


def load(folder: Path, config: ModelConfig, vocab_size: int) -> optax.Params:
    """The parameters of a folder as a network of this form has them, as NumPy arrays."""
    return from_state_dict(state_dict_of(folder), config, vocab_size)


def state_dict_of(folder: Path) -> Mapping[str, np.ndarray]:
    if not is_run(folder):
        from examples import export

        return export.read_weights(folder)
    if jax.process_count() > 1:
        raise UserError(f"--init-from {folder}: several processes begin from an exported folder.")
    model = trained.load(CheckpointRef(folder))
    return to_state_dict(jax.device_get(model.params), model.config.model)
