"""Fixtures of the tests of the trainer: programs, one device, and a trained model, all shared."""

import contextlib
import dataclasses
import functools
import unittest.mock

import jax
import pytest

from examples.trainer.runs import launch, report, trained
from examples.trainer.runs import trained as sampling
from examples.trainer.runs.trained import CheckpointRef
from tests.support.trainer import on_devices, shared_functions, train


@pytest.fixture(scope="session", autouse=True)
def programs():
    """Tests share programs, which a run makes anew."""
    draw = functools.lru_cache(maxsize=32)(sampling.make_draw.__wrapped__)
    with contextlib.ExitStack() as patches:
        patch = unittest.mock.patch.object(launch, "make_functions", shared_functions)
        patches.enter_context(patch)
        patches.enter_context(unittest.mock.patch.object(sampling, "make_draw", draw))
        yield


@pytest.fixture(scope="session", autouse=True)
def pictures():
    """Runs share the first picture of losses: to draw one takes as long as a toy's training."""

    drawn, save = [], report.save

    def save_once(figure, path):
        if not drawn:
            save(figure, path)
            drawn.append(path.read_bytes())
        path.write_bytes(drawn[0])

    with unittest.mock.patch.object(report, "save", save_once):
        yield


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
