"""Properties that hold for whole families of inputs, searched by hypothesis."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_muonplus as omp
from optax_muonplus import coefficients
from optax_muonplus._parameters.dimension_numbers import matrix_view

# Deterministic, and without a deadline: the first example of each shape compiles.
SEARCH = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def layouts(draw):
    """A shape, which axes are output, reduction and batch, and sizes that cut one of them."""
    ndim = draw(st.integers(2, 5))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)))
    axes = draw(st.permutations(range(ndim)))
    n_output = draw(st.integers(1, ndim - 1))
    n_reduction = draw(st.integers(1, ndim - n_output))
    output, reduction = axes[:n_output], axes[n_output : n_output + n_reduction]
    split = draw(st.sampled_from([None, *output, *reduction]))
    sizes = None
    if split is not None:
        first = draw(st.integers(1, shape[split]))
        rest = shape[split] - first
        sizes = (first, rest) if rest else (first,)
    # Axes may be counted from the end.
    signed = [tuple(a - ndim * draw(st.booleans()) for a in side) for side in (reduction, output)]
    return shape, tuple(output), tuple(reduction), omp.MatrixSpec(*signed, sizes, split)


@SEARCH
@given(layouts())
def test_views_are_a_transposition_and_come_back(layout):
    shape, output, reduction, spec = layout
    x = np.arange(math.prod(shape)).reshape(shape)
    batch = tuple(a for a in range(len(shape)) if a not in output + reduction)
    view = matrix_view(shape, spec)
    stored = view.to_matrices(jnp.asarray(x))
    np.testing.assert_array_equal(view.from_matrices(stored), x)
    matrices = [np.swapaxes(m, 1, 2) if view.transposed else m for m in stored]
    assert view.block_shapes() == [m.shape for m in matrices]
    # Cutting and flattening by NumPy, in one go.
    cuts = [] if spec.split_sizes is None else np.cumsum(spec.split_sizes)[:-1]
    parts = np.split(x, cuts, axis=spec.split_axis or 0)
    for part, matrix in zip(parts, matrices, strict=True):
        size = [math.prod(part.shape[a] for a in side) for side in (batch, output, reduction)]
        np.testing.assert_array_equal(
            matrix, part.transpose(batch + output + reduction).reshape(size)
        )


@jax.jit
def step_of(g):
    tx = omp.scale_by_muonplus()
    return tx.update(g, tx.init(g))[0]


@SEARCH
@given(st.floats(-20, 20), st.sampled_from([1, -1]), st.integers(0, 2**31 - 1))
def test_a_multiple_of_the_gradient_gives_the_same_update(exponent, sign, seed):
    g = np.random.default_rng(seed).standard_normal((6, 9))
    scaled = step_of(jnp.asarray(sign * 10.0**exponent * g, jnp.float32))
    plain = step_of(jnp.asarray(g, jnp.float32))
    # The factor rounds each entry once, 6e-8; the iteration amplifies that by up to its slope at 0,
    # 485, for directions that are that small.
    np.testing.assert_allclose(scaled, sign * plain, atol=2e-4)
    np.testing.assert_allclose(np.linalg.norm(plain, axis=0), math.sqrt(9 / 6), rtol=1e-5)


@SEARCH
@given(st.floats(-6, -0.05), st.floats(-2, 2), st.sampled_from([3, 5, 7]))
def test_the_minimax_error_is_the_same_at_both_ends_and_nowhere_larger(
    log_ratio, log_upper, degree
):
    upper = 10.0**log_upper
    lower = upper * 10.0**log_ratio
    row = coefficients.minimax(lower, upper, degree)
    x = np.geomspace(lower, upper, 5001)
    error = 1 - coefficients.evaluate([row], x)
    assert abs(error[0]) <= abs(error).max() <= abs(error[0]) * (1 + 1e-6) + 1e-9
    assert math.isclose(abs(error[0]), abs(error[-1]), rel_tol=1e-6, abs_tol=1e-9)
