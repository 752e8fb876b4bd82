"""States in wrappers, of Flax modules, and as a checkpoint holds them."""

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
from tests.support.trees import SHAPES, random_tree

PARAMS = random_tree(SHAPES)
DIMS = {"up": {"kernel": omp.MuonDimensionNumbers(), "bias": None}, "down": None}
FALLING = optax.linear_schedule(0.1, 0.02, 10)


def inner_momentum(state):
    return omp.transforms.find_momentum(state).mu["up"]["kernel"]


def of_adamw(state, name):
    return getattr(optax.tree.get(state, "ScaleByAdamState"), name)


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def injected(**arguments):
    return optax.inject_hyperparams(omp.muonplus)(0.1, muon_weight_dimension_numbers=DIMS)


WRAPPED = {
    "MultiSteps(inject)": lambda: optax.MultiSteps(injected(), 2),
    "chain(clip, MultiSteps)": lambda: clipped(
        optax.MultiSteps(injected(), 2).gradient_transformation()
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(injected(), 3),
    "schedule_free": lambda: optax.contrib.schedule_free(injected(), 0.1),
    "recorded": lambda: omp.diagnostics.recorded(omp.muonplus)(
        FALLING, muon_weight_dimension_numbers=DIMS
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_need_not_be_those_of_the_old_optimizer(name):
    old = filled(clipped(optax.contrib.muon(0.1, muon_weight_dimension_numbers=DIMS)).init(PARAMS))
    state, _ = omp.take_over(old, WRAPPED[name]().init(PARAMS), PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(WRAPPED[name]().init(PARAMS))
    mu = optax.tree.get(old, "MuonState").mu
    np.testing.assert_array_equal(inner_momentum(state), mu["up"]["kernel"])
    for field in ("mu", "nu"):
        for path in (("up", "bias"), ("down", "kernel")):
            a, b = (functools.reduce(dict.get, path, of_adamw(x, field)) for x in (state, old))
            np.testing.assert_array_equal(a, b)
    counts = optax.tree.get_all_with_path(state, "count")
    assert {int(x) for _, x in counts if x is not None} == {7}


def test_fields_of_parameters_are_no_fields_of_states():
    """Parameters may be called mu, nu and count."""
    params = {"mu": {"mu": jnp.ones((4, 8)), "count": jnp.ones(3)}, "nu": jnp.ones((8, 4))}
    for init in (omp.muonplus(FALLING).init, optax.adamw(FALLING).init):
        old = filled(init(params))
        state, report = omp.take_over(old, init(params), params)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state, old))
        assert not report.started_anew


# As written by version 0.1.0 with a schedule and bias correction, see test_checkpoint_layout.
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


def test_a_tree_of_dictionaries_with_the_layout_of_0_1_0():
    tree = {}
    for path, value in WRITTEN.items():
        *parents, name = f"inner_states/{path}".split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[name] = value
    tx = omp.muonplus(FALLING, bias_correction=True)
    state, report = omp.take_over(tree, tx.init(PARAMS), PARAMS)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("inner_states/"): x
        for path, x in jax.tree.leaves_with_path(state)
    }
    assert found.keys() == WRITTEN.keys()
    for path, value in WRITTEN.items():
        np.testing.assert_array_equal(found[path], value)
    assert not report.started_anew and not report.not_used


def test_amsgrad_from_disk_is_taken_for_adamw():
    """A tree has no names of classes."""
    old = filled(optax.amsgrad(0.1).init(PARAMS))
    new = omp.muonplus(0.1).init(PARAMS)
    with pytest.raises(ValueError, match="a momentum in ScaleByAmsgradState"):
        omp.take_over(old, new, PARAMS)
    state, report = omp.take_over(flax.serialization.to_state_dict(old), new, PARAMS)
    assert optax.tree.get(state, "ScaleByAdamState").count == 7 and not report.started_anew


class Model(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(8, 12, rngs=nnx.Rngs(0))


def read_back(tree, folder):
    """What Orbax restores without being told what it is."""
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state")


@pytest.mark.parametrize("kind", ["orbax", "bytes", "train state"])
def test_checkpoints_without_the_optimizer_that_wrote_them(tmp_path, kind):
    tx = optax.contrib.muon(FALLING)
    old = filled(tx.init(PARAMS))
    if kind == "orbax":
        tree = read_back(old, tmp_path)
        assert isinstance(tree, dict)
    elif kind == "bytes":
        tree = flax.serialization.msgpack_restore(flax.serialization.to_bytes(old))
    else:
        tree = TrainState.create(apply_fn=None, params=PARAMS, tx=tx).replace(opt_state=old)
    new = omp.muonplus(FALLING).init(PARAMS)
    expected, _ = omp.take_over(old, new, PARAMS)
    actual, report = omp.take_over(tree, new, PARAMS)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), actual, expected))
    assert not report.started_anew


def test_an_nnx_optimizer_and_its_checkpoint(tmp_path):
    """Variables before and after; on disk they are dicts with a `value`."""
    model = Model()
    params = nnx.state(model, nnx.Param)
    old = nnx.Optimizer(model, optax.MultiSteps(optax.adamw(FALLING), 2), wrt=nnx.Param)
    old.opt_state = filled(old.opt_state)
    old.opt_state.mini_step[...] = 0
    tree = read_back(nnx.state(old), tmp_path)["opt_state"]
    first = tree["inner_opt_state"]["0"]["mu"]["up"]["kernel"]["value"]
    grads = jax.tree.map(jnp.ones_like, params)
    for state in (old.opt_state, old, tree):
        tx = optax.MultiSteps(omp.muonplus(FALLING, bias_correction=True), 2)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.opt_state, report = omp.take_over(state, optimizer.opt_state, params)
        kept = omp.transforms.find_momentum(optimizer.opt_state)
        np.testing.assert_array_equal(kept.mu["up"]["kernel"][...], first)
        assert kept.count[...] == 7
        if state is not old:  # one level deeper than a state of the optimizer itself
            assert optimizer.opt_state.gradient_step[...] == 7 and not report.started_anew
        optimizer.update(model, grads)


@pytest.mark.parametrize("committed", [False, True])
def test_all_arrays_of_a_state_can_be_donated(committed):
    """JAX refuses to donate one array twice; here all counts come from one, and two momenta."""
    old = filled(optax.adamw(0.1).init(PARAMS))
    tx = optax.chain(omp.momentum(), omp.muonplus(FALLING, bias_correction=True))
    here = jax.device_put((old, tx.init(PARAMS)), jax.devices()[0] if committed else None)
    state, _ = omp.take_over(*here, PARAMS)
    first, second = state[0].mu["up"]["kernel"], inner_momentum(state[1])
    np.testing.assert_array_equal(first, second)
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
