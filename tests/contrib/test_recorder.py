"""The recorder: what it measures, when, and that the update stays the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from optax_muonplus.contrib import read_record, recorded

RULES = [
    ("scanned", omp.MuonDimensionNumbers(-2, -1)),
    ("fused", omp.MatrixSpec(0, 1, split_sizes=(4, 6, 4))),
    ("cut", omp.MatrixSpec(0, 1, split_sizes=(2, 4), split_axis=0)),
]
DIMS = functools.partial(omp.muon_dimension_numbers, rules=RULES)
SHAPES = {
    "up": {"kernel": (6, 9), "bias": (9,)},
    "query": {"kernel": (6, 2, 4)},
    "scanned": {"kernel": (3, 6, 9)},
    "fused": {"kernel": (6, 14)},
    "cut": {"kernel": (6, 8)},
    "nothing": None,
}


def tree(seed=0, dtype=jnp.float32, shapes=SHAPES):
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [jax.random.normal(key, x, dtype) for key, x in zip(keys, leaves, strict=True)]
    return treedef.unflatten(drawn)


def of_matrix(x):
    """The measures of a matrix (out, in) in float64."""
    x = np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
    rows, columns = (np.linalg.norm(x, axis=axis) for axis in (1, 0))
    norm = np.linalg.norm(x)
    return norm, norm / np.sqrt(x.size), rows.max() / rows.min(), columns.max() / columns.min()


def expected(grads):
    """The measures by path, of matrices that NumPy cuts out of the leaves."""
    cut = {
        "up/kernel": grads["up"]["kernel"].T,
        "query/kernel": grads["query"]["kernel"].reshape(6, 8).T,
        "scanned/kernel": [x.T for x in grads["scanned"]["kernel"]],
        "fused/kernel": [x.T for x in np.split(grads["fused"]["kernel"], [4, 10], axis=1)],
        "cut/kernel": [x.T for x in np.split(grads["cut"]["kernel"], [2], axis=0)],
    }
    return {
        path: np.transpose([of_matrix(x) for x in given])
        if isinstance(given, list)
        else of_matrix(given)
        for path, given in cut.items()
    }


def assert_measured(values, stage, grads, rtol=1e-5):
    for path, measures in expected(grads).items():
        for name, wanted in zip(("norm", "rms", "row_ratio", "col_ratio"), measures, strict=True):
            found = values[path][f"{stage}/{name}"]
            np.testing.assert_allclose(found, wanted, rtol=rtol, err_msg=f"{path} {name}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_measures_are_those_of_the_matrices_of_every_layout(dtype):
    grads = tree(dtype=dtype)
    tx = recorded(optax.scale(-0.5), every=1, weight_dimension_numbers=DIMS)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    record = read_record(state)
    assert record.step == 1 and list(record.values) == sorted(expected(grads))
    assert_measured(record.values, "before", grads)
    assert_measured(record.values, "after", updates)
    assert record.values["scanned/kernel"]["after/rms"].shape == (3,)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_neither_vanish_nor_overflow(scale):
    grads = jax.tree.map(lambda x: x * scale, tree())
    tx = recorded(optax.identity(), every=1, weight_dimension_numbers=DIMS)
    assert_measured(read_record(tx.update(grads, tx.init(grads))[1]).values, "before", grads)


def test_ratios_of_zeros():
    x = jnp.ones((4, 6))
    grads = {"zero": 0 * x, "row": x.at[:, 1].set(0)}  # (in, out)
    tx = recorded(optax.identity(), every=1)
    values = read_record(tx.update(grads, tx.init(grads))[1]).values
    assert values["zero"]["before/norm"] == values["zero"]["before/rms"] == 0
    assert np.isnan(values["zero"]["before/row_ratio"])
    assert values["row"]["before/row_ratio"] == np.inf
    assert values["row"]["before/col_ratio"] == 1


def test_the_update_is_the_same_bit_for_bit():
    params, given = tree(), {"muon_weight_dimension_numbers": DIMS, "weight_decay": 0.1}
    plain = omp.muonplus(0.1, **given)
    tx = recorded(plain, every=2, weight_dimension_numbers=DIMS)
    state, inner = tx.init(params), plain.init(params)
    for step in range(3):
        updates, state = jax.jit(tx.update)(tree(step), state, params)
        wanted, inner = jax.jit(plain.update)(tree(step), inner, params)
        jax.tree.map(np.testing.assert_array_equal, (updates, state.inner), (wanted, inner))


@pytest.mark.parametrize("jit", [True, False])
def test_records_are_made_at_chosen_updates(jit):
    tx = recorded(optax.identity(), every=3, only="^up/", weight_dimension_numbers=DIMS)
    update = jax.jit(tx.update) if jit else tx.update
    state, steps, found = tx.init(tree()), [], []
    for step in range(6):
        _, state = update(tree(step), state)
        record = read_record(state)
        assert list(record.values) == ["up/kernel"]
        steps.append(record.step)
        found.append(record.values["up/kernel"]["before/norm"])
    assert steps == [-1, -1, 3, 3, 3, 6]
    assert np.isnan(found[:2]).all() and found[2] == found[4] != found[5]
    np.testing.assert_allclose(found[5], np.linalg.norm(tree(5)["up"]["kernel"]), rtol=1e-6)


def test_a_link_inside_a_chain_has_the_momentum_and_its_polar_factor():
    grads = {"up": {"kernel": jax.random.normal(jax.random.key(0), (8, 16))}}
    links = omp.momentum(nesterov=False), recorded(omp.orthogonalize(polar="svd"), every=1)
    tx = optax.chain(*links, optax.scale(-0.1))
    values = read_record(tx.update(grads, tx.init(grads), grads)[1]).values["up/kernel"]
    expected = 0.05 * np.linalg.norm(grads["up"]["kernel"])
    np.testing.assert_allclose(values["before/norm"], expected, rtol=1e-5)
    np.testing.assert_allclose(values["after/norm"], np.sqrt(8), rtol=1e-5)


def test_parameters_are_told_from_records():
    plain = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS)
    tx = recorded(plain, weight_dimension_numbers=DIMS)
    state = tx.init(tree())
    marked = optax.tree.map_params(tx, lambda _: "param", state, transform_non_params=lambda _: 0)
    assert (marked.values, marked.names, marked.step) == (0, 0, 0)


@pytest.mark.several_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_matrices_have_the_measures_of_one_device(kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    shapes = {"up": {"kernel": (16, 32), "bias": (32,)}, "scanned": {"kernel": (4, 16, 32)}}
    dims = functools.partial(omp.muon_dimension_numbers, rules=RULES[:1])
    specs = {1: P("b"), 2: P("a", "b"), 3: P("a", None, "b")}
    grads = tree(1, shapes=shapes)
    spread = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, specs[x.ndim])), grads)
    tx = recorded(optax.scale(2.0), every=1, weight_dimension_numbers=dims)
    with jax.set_mesh(mesh):
        found = read_record(jax.jit(tx.update)(spread, jax.jit(tx.init)(spread))[1])
    alone = read_record(jax.jit(tx.update)(grads, tx.init(grads))[1])
    for path, values in alone.values.items():
        for name, value in values.items():
            np.testing.assert_allclose(found.values[path][name], value, rtol=1e-5)


def test_what_records_nothing_is_refused():
    with pytest.raises(ValueError, match="every=0 records no update"):
        recorded(optax.identity(), every=0)
    with pytest.raises(ValueError, match="only='upp' and the dimension numbers leave no matrix"):
        recorded(optax.identity(), only="upp").init({"up": jnp.ones((2, 3))})
    two = optax.chain(*[recorded(optax.identity())] * 2)
    for tx, count in ((two, 2), (optax.sgd(0.1), 0)):
        with pytest.raises(ValueError, match=f"{count} recorders"):
            read_record(tx.init({"up": jnp.ones((2, 3))}))
