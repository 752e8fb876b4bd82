"""Muon+ in Levanter: ``optimizer: {type: muonplus}`` in its YAML, after one import.

``levanter_config.py`` beside this file is the one to copy. For Levanter's own ``train_lm``, this is
the whole script, to be started with ``--config_path``::

    import levanter.config, levanter.main.train_lm
    import levanter_config
    levanter.config.main(levanter.main.train_lm.main)()

``optimizer`` then takes the keys of ``MuonPlusConfig``. Here a tiny LLaMA with scanned layers
learns which token follows which, in Levanter's ``Trainer``: ``train_lm`` wants a tokenizer from a
hub.

Install: ``pip install --pre marin-levanter`` (tried: 0.2.227, haliax 0.2.227, optax 0.2.6, jax
0.11.2, Python 3.12).
Run: ``python -m examples.hosts.levanter``.
"""

import dataclasses
import functools
import pathlib
import tempfile

import draccus
import equinox as eqx
import haliax
import jax
import numpy as np
import yaml
from levanter.data.dataset import ListAsyncDataset
from levanter.models.lm_model import LmConfig, LmExample
from levanter.optim.config import OptimizerConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import trainables_only

import optax_muonplus as omp
from examples.hosts import levanter_config as levanter_config  # what a user adds

VOCABULARY, LENGTH, ROWS = 64, 32, 32

CONFIG = """
model: {type: llama, max_seq_len: 32, hidden_dim: 32, intermediate_dim: 96,
        num_layers: 2, num_heads: 4, num_kv_heads: 2}
optimizer: {type: muonplus, learning_rate: 0.02, warmup: 2}
trainer:
  tracker: {type: noop}
  train_batch_size: 32
  num_train_steps: 40
  require_accelerator: false
"""


@dataclasses.dataclass
class Config:
    """The parts of Levanter's ``TrainLmConfig`` that are used here."""

    model: LmConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig


def read(text, **parts):
    """The configuration, with some of its parts in place of those of the text."""
    return draccus.decode(Config, yaml.safe_load(text) | parts)


def model_parameters(config):
    """Without their numbers: what ``describe`` needs."""
    build = functools.partial(config.model.build, haliax.Axis("vocab", VOCABULARY))
    return trainables_only(eqx.filter_eval_shape(build, key=jax.random.PRNGKey(0)), True)


def examples(count):
    """Texts in which each token has one successor."""
    rng = np.random.default_rng(0)
    successor = rng.permutation(VOCABULARY)
    tokens = [rng.integers(VOCABULARY, size=count)]
    for _ in range(LENGTH - 1):
        tokens.append(successor[tokens[-1]])
    position = haliax.Axis("position", LENGTH)
    return [
        LmExample.causal(haliax.named(np.asarray(row, np.int32), position))
        for row in np.stack(tokens, axis=1)
    ]


def train(config, folder):
    """Levanter's own loop: the state at its end, and the loss of each step."""
    config.trainer.log_dir = pathlib.Path(folder) / "logs"
    config.trainer.checkpointer.base_path = f"{folder}/checkpoints"
    config.trainer.initialize()
    losses = {}  # by step: the trainer calls its hooks once more at the end
    optimizer = config.optimizer.build(config.trainer.num_train_steps)
    with Trainer(config.trainer, optimizer, loss_function) as trainer:
        vocabulary, key = haliax.Axis("vocab", VOCABULARY), jax.random.PRNGKey(0)
        state = trainer.initial_state(
            key, model_init=lambda: config.model.build(vocabulary, key=key)
        )
        trainer.add_hook(lambda step: losses.update({step.step: float(step.loss)}), every=1)
        loader = trainer.data_loader(ListAsyncDataset(examples(ROWS * 40)))
        state = trainer.train(state, loader.iter_from_step(int(state.step))).state
    return state, list(losses.values())


def loss_function(model, example, *, key=None):
    """As in ``train_lm``."""
    return model.compute_next_token_loss(example, key=key)


if __name__ == "__main__":
    print(omp.describe(model_parameters(read(CONFIG))))
    for name, optimizer in [
        ("Muon+", yaml.safe_load(CONFIG)["optimizer"]),
        ("AdamW", {"type": "adam", "learning_rate": 5e-3, "warmup": 2}),
        ("Muon", {"type": "muon", "learning_rate": 0.02, "adam_lr": 0.02, "warmup": 2}),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            losses = train(read(CONFIG, optimizer=optimizer), folder)[1]
        print(name, *(f"{loss:.3f}" for loss in [*losses[::8], losses[-1]]))
