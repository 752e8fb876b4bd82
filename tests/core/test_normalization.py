"""Normalization, Frobenius matching and shape factors of arrays, against the float64 oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_muonplus import matrices
from tests.support import reference
from tests.support.oracle_runs import NORMS

RTOL = 1e-6  # two roots of sums of ten squares in float32


def gaussian(*shape, dtype=np.float32):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def normalize(x, norm, norm_eps=1e-8):
    return matrices.Normalize(norm, norm_eps, match_frobenius=False)(x)


@pytest.mark.parametrize(
    "norm_eps, dtype", [(0.0, "float32"), (0.5, "float32"), (1e-8, "complex64")]
)
@pytest.mark.parametrize("norm", NORMS)
def test_normalization_is_the_papers_norm_dir(norm, norm_eps, dtype):
    x = gaussian(2, 6, 10, dtype=np.dtype(dtype))
    normalized = normalize(jnp.asarray(x), norm, norm_eps)
    assert normalized.dtype == dtype
    wide = x.astype(np.complex128 if dtype == "complex64" else np.float64)
    for given, matrix in zip(normalized, wide, strict=True):
        expected = reference.norm_dir(matrix, norm, norm_eps)
        np.testing.assert_allclose(given, expected, rtol=RTOL, atol=1e-7)


@pytest.mark.parametrize(
    ("size", "norm_eps"), [(100, 3e4), *((10.0**k, 1e-8) for k in (-30, -12, -4, -2, 0, 4, 18, 25))]
)
@pytest.mark.parametrize("norm", ["row", "col_row"])
def test_norm_eps_is_not_scaled_with_the_matrix(norm, size, norm_eps):
    """Small rows shrink as ever: what keeps squares in range does not change the rule."""
    x = size * gaussian(6, 10).astype(np.float64)
    normalized = normalize(jnp.asarray(x, jnp.float32), norm, norm_eps)
    np.testing.assert_allclose(normalized, reference.norm_dir(x, norm, norm_eps), rtol=RTOL)


@pytest.mark.parametrize("norm", NORMS)
def test_matrices_stored_the_other_way_get_the_same(norm):
    """Square ones too, where a name decides."""
    for shape in ((2, 6, 10), (2, 10, 6), (2, 6, 6)):
        x = jnp.asarray(gaussian(*shape))
        given = matrices.Normalize(norm, match_frobenius=False).transposed()(jnp.swapaxes(x, 1, 2))
        expected = normalize(x, norm)
        np.testing.assert_allclose(jnp.swapaxes(given, 1, 2), expected, rtol=RTOL)


@pytest.mark.parametrize("norm", NORMS)
def test_zero_rows_and_columns_stay_zero(norm):
    x = gaussian(6, 10)
    x[2], x[:, 3] = 0, 0
    normalized = normalize(jnp.asarray(x), norm, norm_eps=0.0)
    assert np.isfinite(normalized).all()
    np.testing.assert_array_equal(normalized == 0, x == 0)


@pytest.mark.parametrize("shape", [(6, 6), (6, 15), (15, 6)], ids=str)
def test_shape_factors(shape):
    for word in ("spectral", "max", "none"):
        expected = reference.shape_factor(*shape, word)
        assert matrices.ScaleByShape(word).factor(*shape) == pytest.approx(expected)
    for norm in NORMS:
        for match in (False, True):
            scale = matrices.ScaleByShape("max", 0.2, norm, match)
            assert scale.factor(*shape) == pytest.approx(
                reference.rms_factor(*shape, 0.2, norm, match)
            )
