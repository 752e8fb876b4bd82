"""Normalization, Frobenius matching and shape factors of arrays, against the float64 oracle."""

import jax
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


@pytest.mark.parametrize(
    "norm_eps, dtype", [(0.0, "float32"), (0.5, "float32"), (1e-8, "complex64")]
)
@pytest.mark.parametrize("norm", [*NORMS, "auto"])
def test_normalize_matrix_is_the_papers_norm_dir(norm, norm_eps, dtype):
    x = gaussian(2, 6, 10, dtype=np.dtype(dtype))
    normalized = matrices.normalize_matrix(jnp.asarray(x), norm, norm_eps)
    assert normalized.dtype == dtype
    wide = x.astype(np.complex128 if dtype == "complex64" else np.float64)
    for given, matrix in zip(normalized, wide, strict=True):
        expected = reference.norm_dir(matrix, norm, norm_eps)
        np.testing.assert_allclose(given, expected, rtol=RTOL, atol=1e-7)


@pytest.mark.parametrize("norm", ["row", "col_row"])
def test_norm_eps_counts_beside_large_entries(norm):
    """They are divided by a power of two, so that squares do not overflow, and norm_eps is too."""
    x = 100 * gaussian(6, 10)
    normalized = matrices.normalize_matrix(jnp.asarray(x), norm, norm_eps=3e4)
    expected = reference.norm_dir(x.astype(np.float64), norm, 3e4)
    np.testing.assert_allclose(normalized, expected, rtol=RTOL, atol=1e-9)


@pytest.mark.parametrize("norm", [*NORMS, "auto"])
def test_matrices_stored_the_other_way_get_the_same(norm):
    """Square ones too, where a name or a tie decides."""
    for shape in ((2, 6, 10), (2, 10, 6), (2, 6, 6)):
        x = jnp.asarray(gaussian(*shape))
        given = matrices.Normalize(norm).transposed()(jnp.swapaxes(x, 1, 2))
        expected = matrices.normalize_matrix(x, norm)
        np.testing.assert_allclose(jnp.swapaxes(given, 1, 2), expected, rtol=RTOL)
    symmetric = x + jnp.swapaxes(x, 1, 2)  # rows and columns vary alike
    given = matrices.Normalize("auto").transposed()(symmetric)
    np.testing.assert_allclose(
        jnp.swapaxes(given, 1, 2), matrices.normalize_matrix(symmetric, "row"), rtol=RTOL
    )


def test_auto_chooses_for_each_matrix_of_any_size():
    """Numbers with squares that float32 does not have."""
    x = gaussian(3, 6, 6) * np.float32(1e25)
    x[0] *= 4.0 ** np.arange(6)[:, None]
    x[1] *= 4.0 ** np.arange(6)
    given = matrices.normalize_matrix(jnp.asarray(x), "auto")
    for matrix, side, normalized in zip(x, ("row", "col", "auto"), given, strict=True):
        expected = reference.norm_dir(matrix.astype(np.float64), side)
        np.testing.assert_allclose(normalized, expected, rtol=RTOL)


def test_auto_does_not_count_zero_rows():
    """They would make the other rows, which are even, the side that varies more."""
    x = gaussian(8, 6).astype(np.float64)
    x[5:] = 0
    x /= np.linalg.norm(x, axis=1, keepdims=True) + (x == 0).all(axis=1, keepdims=True)
    found = matrices.normalize_matrix(jnp.asarray(x, jnp.float32), "auto")
    np.testing.assert_allclose(found, reference.norm_dir(x, "col"), rtol=RTOL, atol=1e-7)


def test_default_normalizes_columns_and_then_rows():
    x = jnp.asarray(gaussian(6, 10))
    np.testing.assert_array_equal(
        matrices.normalize_matrix(x), matrices.normalize_matrix(x, "col_row", 1e-8)
    )


@pytest.mark.parametrize("norm", [*NORMS, "auto"])
def test_zero_rows_and_columns_stay_zero(norm):
    x = gaussian(6, 10)
    x[2], x[:, 3] = 0, 0
    normalized = matrices.normalize_matrix(jnp.asarray(x), norm, norm_eps=0.0)
    assert np.isfinite(normalized).all()
    np.testing.assert_array_equal(normalized == 0, x == 0)


def test_sums_of_float16_matrices_do_not_overflow():
    """The squares of 300 are beyond float16's 65504."""
    x = jnp.full((4, 9), 300, jnp.float16)
    normalized = matrices.normalize_matrix(x, "row")
    assert normalized.dtype == jnp.float16
    np.testing.assert_allclose(normalized, 1 / 3, rtol=1e-3)


def test_match_frobenius_norm_rescales_each_matrix():
    x, like = gaussian(3, 6, 10), gaussian(3, 6, 10)[::-1] * np.float32(7)
    matched = np.asarray(matrices.match_frobenius_norm(jnp.asarray(x), jnp.asarray(like)))
    factor = np.linalg.norm(like, axis=(1, 2)) / np.linalg.norm(x, axis=(1, 2))
    np.testing.assert_allclose(matched, factor[:, None, None] * x, rtol=RTOL)
    zero = jnp.zeros((6, 10))
    assert not np.any(matrices.match_frobenius_norm(zero, jnp.asarray(like[0])))
    assert not np.any(matrices.match_frobenius_norm(jnp.asarray(x[0]), zero))


@pytest.mark.parametrize("shape", [(6, 6), (6, 15), (15, 6)], ids=str)
def test_shape_factors(shape):
    for word in ("spectral", "max", "none"):
        expected = reference.shape_factor(*shape, word)
        assert matrices.shape_factor(*shape, word) == pytest.approx(expected)
    for norm in (*NORMS, "auto"):
        for match in (False, True):
            given = matrices.shape_factor(
                *shape, consistent_rms=0.2, norm=norm, match_frobenius=match
            )
            assert given == pytest.approx(reference.rms_factor(*shape, 0.2, norm, match))


def test_unknown_words_are_refused():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=r"Unknown norm 'rows'\. Known: none, col, row"):
        matrices.normalize_matrix(x, "rows")
    with pytest.raises(ValueError, match=r"Unknown norm 'rows'\. Known: none, col, row"):
        matrices.shape_factor(2, 3, norm="rows")
    with pytest.raises(ValueError, match=r"Unknown shape_scale 'big'\. Known: spectral, max, none"):
        matrices.shape_factor(2, 3, "big")


def test_consistent_rms_may_be_traced():
    given = jax.jit(lambda rms: matrices.shape_factor(6, 15, consistent_rms=rms))(0.2)
    np.testing.assert_allclose(given, 0.2 * np.sqrt(15), rtol=RTOL)
