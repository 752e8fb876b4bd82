"""Which blocks' curvatures are computed, how many at once, and in how much memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import theory
from tests.support.curvature import (
    compiled,
    mlp,
    mlp_loss,
    quadratic,
)


def test_blocks_at_once_changes_nothing_and_a_choice_of_blocks_is_a_part_of_all():
    params, x, y = mlp()
    run = functools.partial(compiled, lambda p: mlp_loss(p, x, y), params, key=jax.random.key(4))
    one, many = run(blocks_at_once=1), run(blocks_at_once=4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, many)
    some = run(blocks=3, iterations=100)["up/kernel"]
    index = np.asarray(some.index[0][0])
    assert index.shape == (3,) and np.all(np.diff(index) > 0) and index[-1] < 6
    everything = run(blocks=100, iterations=100)["up/kernel"].norms[0][0]
    np.testing.assert_allclose(some.norms[0][0], everything[index], rtol=1e-3)
    other = compiled(lambda p: mlp_loss(p, x, y), params, key=jax.random.key(5), blocks=3)
    assert any(
        not np.array_equal(other[path].index[0], run(blocks=3)[path].index[0]) for path in other
    )


def test_choices_stand_for_all_blocks_and_differ_between_matrices():
    norms = np.arange(1.0, 7.0)
    update = np.random.default_rng(0).standard_normal((1, 5, 6))
    view = compiled(
        lambda p: 0.5 * jnp.sum(jnp.asarray(norms, jnp.float32) * jnp.sum(p["w"] ** 2, (0, 1))),
        {"w": jnp.ones((1, 5, 6))},
        weight_dimension_numbers={"w": omp.MuonDimensionNumbers(1, 2)},
        key=jax.random.key(0),
        blocks=2,
        iterations=2,
    )["w"]
    estimate = theory.weighted_curvature({"w": view}, {"w": update})["w"][0]
    index = np.asarray(view.index[0][0])
    terms = norms * np.sum(update[0] ** 2, 0)
    np.testing.assert_allclose(estimate, terms[index].sum() * 3, rtol=1e-5)
    stacked = compiled(
        lambda p: jnp.sum(jnp.square(p["w"])),
        {"w": jnp.ones((8, 3, 30))},
        weight_dimension_numbers={"w": omp.MuonDimensionNumbers(1, 2)},
        key=jax.random.key(0),
        blocks=4,
        iterations=1,
    )["w"].index[0]
    assert stacked.shape == (8, 4) and len(np.unique(stacked, axis=0)) == 8


@pytest.mark.cpu_program
def test_no_dense_hessian_is_in_memory():
    """The Hessian of a 64 x 64 kernel would be 64 MiB; all rows' norms take a few."""
    x = jnp.ones((16, 64))

    def norms(kernel):
        return theory.block_curvatures(
            lambda p: jnp.mean(jnp.tanh(x @ p["kernel"]) ** 2),
            {"kernel": kernel},
            key=jax.random.key(0),
        )["kernel"].norms

    compiled = jax.jit(norms).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21


def test_narrow_parameters_have_norms_in_float32():
    hessian = np.diag(np.arange(1.0, 7.0))
    params = {"a": {"kernel": jnp.ones((3, 2), jnp.bfloat16)}}
    loss = quadratic(hessian, "a/kernel")
    found = compiled(loss, params, key=jax.random.key(0))["a/kernel"].norms[0]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [[5, 6]], rtol=0.02)
