"""States as checkpoints hold them, without the optimizer that wrote them."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_muonplus as omp
from tests.support.states import filled
from tests.support.trees import SHAPES, by_path, random_tree

PARAMS = random_tree(SHAPES)
FALLING = optax.linear_schedule(0.1, 0.02, 10)


def read_back(tree, folder):
    """Returns what Orbax restores without being told what it is."""
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state")


def test_amsgrad_from_disk_is_taken_for_adamw():
    """A tree has no names of classes."""
    old = flax.serialization.to_state_dict(filled(optax.amsgrad(0.1).init(PARAMS)))
    state, report = omp.take_over(old, omp.muonplus(0.1).init(PARAMS), PARAMS)
    assert optax.tree.get(state, "ScaleByAdamState").count == 7 and not report.started_anew


# Version 0.1.0 wrote this with a schedule and bias correction, see test_checkpoint_layout.
WRITTEN = {
    "adam/inner_state/0/count": 5,
    "adam/inner_state/0/mu/up/bias": np.full(12, 1.0, np.float32),
    "adam/inner_state/0/nu/up/bias": np.full(12, 2.0, np.float32),
    "adam/inner_state/2/count": 5,
    "muon/inner_state/0/0/count": 5,
    "muon/inner_state/0/0/mu/up/kernel": np.full((8, 12), 3.0, np.float32),
    "muon/inner_state/0/0/mu/down/kernel": np.full((12, 8), 4.0, np.float32),
    "muon/inner_state/2/count": 5,
}


@pytest.mark.parametrize("bias_correction", [False, True])
def test_a_tree_of_dictionaries_with_the_layout_of_0_1_0(bias_correction):
    written = dict(WRITTEN)
    if not bias_correction:
        del written["muon/inner_state/0/0/count"]
    tree = {}
    for path, value in written.items():
        *parents, name = f"inner_states/{path}".split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[name] = value
    tx = omp.muonplus(FALLING, bias_correction=bias_correction)
    state, report = omp.take_over(tree, tx.init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, by_path(state.inner_states), written)
    assert not report.started_anew and not report.not_used


@pytest.mark.parametrize("kind", ["orbax", "train state"])
def test_checkpoints_without_the_optimizer_that_wrote_them(tmp_path, kind):
    tx = optax.contrib.muon(FALLING)
    old = filled(tx.init(PARAMS))
    if kind == "orbax":
        tree = read_back(old, tmp_path)
    else:
        tree = TrainState.create(apply_fn=None, params=PARAMS, tx=tx).replace(opt_state=old)
    new = omp.muonplus(FALLING).init(PARAMS)
    actual, expected = (omp.take_over(x, new, PARAMS)[0] for x in (tree, old))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_parameter_called_count_counts_nothing():
    params = {"up": jnp.ones((4, 8)), "scale": {"count": jnp.asarray(0.5)}}
    tx = omp.muonplus(FALLING, bias_correction=True)
    old = flax.serialization.to_state_dict(filled(tx.init(params)))
    state, _ = omp.take_over({"params": params, "opt_state": old}, tx.init(params), params)
    assert omp.transforms.find_momentum(state).count == 7


class Model(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(8, 12, rngs=nnx.Rngs(0))


def test_an_nnx_optimizer_and_its_checkpoint(tmp_path):
    """Variables before and after; on disk they are dicts with a `value`."""
    model = Model()
    params = nnx.state(model, nnx.Param)
    old = nnx.Optimizer(model, optax.MultiSteps(optax.adamw(FALLING), 2), wrt=nnx.Param)
    old.opt_state = filled(old.opt_state)
    old.opt_state.mini_step[...] = 0
    tree = read_back(nnx.state(old), tmp_path)["opt_state"]
    first = tree["inner_opt_state"]["0"]["mu"]["up"]["kernel"]["value"]
    for state in (old.opt_state, old, tree):
        tx = optax.MultiSteps(omp.muonplus(FALLING, bias_correction=True), 2)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.opt_state, report = omp.take_over(state, optimizer.opt_state, params)
        kept = omp.transforms.find_momentum(optimizer.opt_state)
        np.testing.assert_array_equal(kept.mu["up"]["kernel"][...], first)
        assert kept.count[...] == 7
        if state is not old:  # one level deeper than a state of the optimizer itself
            assert optimizer.opt_state.gradient_step[...] == 7 and not report.started_anew
        optimizer.update(model, jax.tree.map(jnp.ones_like, params))
    plain = nnx.to_pure_dict(params)
    state, _ = omp.take_over(tree, omp.muonplus(FALLING).init(plain), plain)
    np.testing.assert_array_equal(omp.transforms.find_momentum(state).mu["up"]["kernel"], first)
