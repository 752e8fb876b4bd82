"""Measures of imbalance against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muonplus import diagnostics
from tests.support.measures import (
    SIDES,
    correlation,
    distance,
    gaussian,
    ratio,
    rms,
    squares,
    variance,
)

ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5, "complex64": 1e-5}


@pytest.mark.parametrize(
    "shape, dtype",
    [*(((6, 9), dtype) for dtype in ROUNDING), *((s, "float32") for s in ((9, 6), (1, 5), (5, 1)))],
    ids=str,
)
def test_measures_of_one_matrix(shape, dtype):
    """Inputs are what the dtype holds, sums are float32 at least: 2^-24 each, 10^-5 in all."""
    with jax.enable_x64(dtype == "float64"):
        x, y = gaussian(*shape, dtype=dtype), gaussian(*shape, seed=5, dtype=dtype)
        close = functools.partial(np.testing.assert_allclose, rtol=ROUNDING[dtype], atol=1e-7)
        for side in SIDES:
            close(diagnostics.norm_variance(x, side), variance(x, side))
            close(diagnostics.norm_ratio(x, side), ratio(x, side))
            if shape[side == "col"] > 1:
                close(diagnostics.spearman(x, y, side), correlation(x, y, side))
        close(diagnostics.rms(x), rms(x))
        close(diagnostics.polar_distance(y, x), distance(y, x))
        wide = jnp.float64 if dtype == "float64" else jnp.float32
        assert diagnostics.norm_variance(x).dtype == diagnostics.rms(x).dtype == wide


def test_measures_of_stacks_under_jit_and_vmap():
    x, y = gaussian(2, 3, 4, 5), gaussian(2, 3, 4, 5, seed=1)
    one = {
        "variance": lambda x, y: diagnostics.norm_variance(x, "col"),
        "ratio": lambda x, y: diagnostics.norm_ratio(x, "col"),
        "spearman": lambda x, y: diagnostics.spearman(x, y, "col"),
        "floor": lambda x, y: diagnostics.floor_share(x, "col", 3.0),
        "rms": lambda x, y: diagnostics.rms(x),
        "distance": diagnostics.polar_distance,
    }
    for name, function in one.items():
        whole = jax.jit(function)(x, y)
        assert whole.shape == (2, 3)
        mapped = jax.vmap(jax.vmap(function))(x, y)
        alone = np.array([[function(x[i, j], y[i, j]) for j in range(3)] for i in range(2)])
        np.testing.assert_allclose(whole, alone, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(mapped, alone, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("scale", [1e-15, 1e-8, 1e8])
def test_measures_of_small_and_large_matrices(scale):
    """Squares of 1e-25 vanish in float32; as does their variance, which is 0 and not NaN."""
    x = gaussian(6, 9) * scale
    np.testing.assert_allclose(diagnostics.rms(x), rms(x), rtol=1e-5)
    for side in SIDES:
        np.testing.assert_allclose(diagnostics.norm_ratio(x, side), ratio(x, side), rtol=1e-5)
        given = diagnostics.norm_variance(x, side)
        expected = np.float32(variance(x, side))
        np.testing.assert_allclose(given, expected if expected > 1e-37 else 0, rtol=1e-5)
    tiny = gaussian(6, 9) * 1e-30
    assert diagnostics.spearman(tiny, x) == 1, "the order is that of the norms"
    assert diagnostics.norm_variance(jnp.full((4, 4), 1e30)) == 0, "equal rows, whatever the size"


def test_equal_norms_share_their_rank():
    """Small integers: the sums are exact, so that ties are ties."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.integers(0, 2, (2, 9, 4)).astype(np.float32)
        assert len(set(squares(x, "row"))) < 9
        given = diagnostics.spearman(jnp.asarray(x), jnp.asarray(y))
        np.testing.assert_allclose(given, correlation(x, y, "row"), atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_undefined_measures_are_nan_or_infinite(dtype):
    """NaN for rank correlations of equal norms, under jit too; no exception anywhere."""
    x, ones = gaussian(4, 6, dtype=dtype), jnp.ones((4, 6), dtype)
    zero = 0 * ones
    spearman = jax.jit(diagnostics.spearman)
    undefined = [(x, ones), (ones, x), (zero, x), (x[:1], x[:1]), (x * jnp.nan, x)]
    undefined.append((x, x.at[2, 1].set(jnp.inf)))
    assert all(np.isnan(spearman(*pair)) for pair in undefined)
    for side in SIDES:
        assert diagnostics.norm_variance(zero, side) == 0
        assert diagnostics.norm_variance(ones, side) == 0
        assert diagnostics.norm_ratio(ones, side) == 1
        assert np.isnan(diagnostics.norm_ratio(zero, side))
        assert diagnostics.floor_share(zero, side) == 1
        assert diagnostics.floor_share(zero, side, 0.0) == 1
    assert diagnostics.norm_ratio(x.at[1].set(0)) == np.inf
    assert diagnostics.norm_ratio(x.at[1].set(0), "col") < np.inf
    assert diagnostics.rms(zero) == diagnostics.polar_distance(zero, zero) == 0
    assert diagnostics.polar_distance(ones, zero) == np.inf


def test_share_of_rows_at_the_floor():
    """Rows of squared norm 4, 1 and 0, columns of 2, 2 and 1: at the floor means not above it."""
    x = jnp.asarray([[1.0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    for floor, rows, cols in [(0.5, 1, 0), (1.0, 2, 3), (1.5, 2, 3), (2.0, 2, 4)]:
        assert diagnostics.floor_share(x, "row", floor) == np.float32(rows / 3)
        assert diagnostics.floor_share(x, "col", floor) == cols / 4


def test_measures_refuse_other_shapes_and_sides():
    x = gaussian(3, 4)
    with pytest.raises(ValueError, match=r"shape \(3,\).*Leave vectors out"):
        diagnostics.norm_variance(x[:, 0])
    with pytest.raises(ValueError, match="not empty"):
        diagnostics.rms(x[:0])
    with pytest.raises(ValueError, match=r"Unknown side 'column'\. Known: row, col"):
        diagnostics.norm_ratio(x, "column")
    for function in (diagnostics.spearman, diagnostics.polar_distance):
        with pytest.raises(ValueError, match=r"\(3, 4\) and \(4, 3\)"):
            function(x, x.T)
