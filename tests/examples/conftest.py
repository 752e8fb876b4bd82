"""Fixtures of the tests of the trainer: one device, and a trained model that tests share."""

import dataclasses

import jax
import pytest

from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from tests.support.trainer import on_devices, train


@pytest.fixture(scope="module")
def one_device():
    """JAX has one device."""
    with on_devices(1):
        yield


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory, text):
    """The folder of a finished run, with checkpoints of steps 16 and 24."""
    root = tmp_path_factory.mktemp("trained")
    with on_devices(1):
        assert train(text, root, "--name", "x") == 0
    return root / "x"


@pytest.fixture(scope="session")
def model(trained_run):
    """The model of that run."""
    with on_devices(1):
        return trained.load(CheckpointRef(trained_run))


@pytest.fixture(scope="session")
def varied_model(model):
    """The model with noisy parameters, so that it does not repeat one token again and again."""
    leaves, tree = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noise = [0.5 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    params = [x + e for x, e in zip(leaves, noise, strict=True)]
    return dataclasses.replace(model, params=jax.tree.unflatten(tree, params))
