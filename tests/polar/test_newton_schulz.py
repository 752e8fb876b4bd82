"""Polar factors on plain arrays: spectra, preconditioning, precision, extreme inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import coefficients, polar
from optax_muonplus.polar import FastPolar, Orthogonalize
from tests.support import reference
from tests.support.oracle_runs import TOLERANCE

SHAPES = [(16, 16), (16, 40), (40, 16)]
TABLES = {"jordan": 5, "you": 6, "dion": 5, "turbo": 4, "polar_express": 6, "cans": 5, "cubic": 5}


def with_spectrum(rng, shape, singular_values):
    """A matrix with the given singular values, and its exact singular vectors."""
    u, _ = np.linalg.qr(rng.standard_normal((shape[0], shape[0])))
    v, _ = np.linalg.qr(rng.standard_normal((shape[1], shape[1])))
    r = len(singular_values)
    return u[:, :r] * singular_values @ v[:, :r].T, u[:, :r], v[:, :r]


@pytest.mark.parametrize(
    "name, shape",
    [*((name, (16, 40)) for name in TABLES), *(("jordan", s) for s in [(16, 16), (40, 16)])],
)
def test_newton_schulz_maps_singular_values_and_keeps_vectors(name, shape):
    """U diag(s) V^T goes to U diag(p(s / ||s||)) V^T: an oracle without products of matrices."""
    s = np.logspace(0, -2, 16)
    x, u, v = with_spectrum(np.random.default_rng(0), shape, s)
    rows, steps, safety_factor, *_ = coefficients.for_steps(name, TABLES[name])
    expected = u * coefficients.evaluate(rows, s / (safety_factor * np.linalg.norm(s))) @ v.T
    result = polar.newton_schulz(jnp.asarray(x, jnp.float32), Orthogonalize(name, steps))
    # Slopes at 0 reach 1000: float32 rounding of the input comes out as 1000 * 6e-8. Five rows of
    # CANS take terms of order 8 down to 0.002 first, as LOOSER in test_against_reference says.
    np.testing.assert_allclose(result, expected, atol=5e-4 if name == "cans" else 1e-4)


@pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "schatten", "aol", "aol_out"])
@pytest.mark.parametrize("shape", SHAPES)
def test_preconditioning_bounds_the_spectrum_so_that_steps_converge(preconditioning, shape):
    """Each norm bounds the largest singular value by 1: no singular value may leave (0, 1]."""
    x, u, v = with_spectrum(np.random.default_rng(2), shape, np.logspace(0, -1, 16))
    result = polar.newton_schulz(
        jnp.asarray(100 * x, jnp.float32),
        Orthogonalize((1.875, -1.25, 0.375), 14, preconditioning=preconditioning),
    )
    values = np.linalg.svd(result, compute_uv=False)[:16]
    np.testing.assert_allclose(values, 1, atol=1e-5)
    if not preconditioning.startswith("aol"):  # which gives the polar factor of a rescaled matrix
        np.testing.assert_allclose(result, u @ v.T, atol=1e-5)


def test_svd_is_the_exact_factor_and_a_partial_isometry_for_lower_rank():
    rng = np.random.default_rng(4)
    x, u, v = with_spectrum(rng, (12, 20), np.array([3.0, 1.0, 0.1]))
    np.testing.assert_allclose(polar.svd(jnp.asarray(x, jnp.float32)), u @ v.T, atol=1e-5)
    z = rng.standard_normal((3, 12, 12)) + 1j * rng.standard_normal((3, 12, 12))
    result = np.asarray(polar.svd(jnp.asarray(z, jnp.complex64)))
    uu, _, vh = np.linalg.svd(z)
    np.testing.assert_allclose(result, uu @ vh, atol=1e-5)


def test_eps_is_added_to_the_norm_whatever_the_scale():
    x = jax.random.normal(jax.random.key(0), (8, 12))
    norm = float(jnp.linalg.norm(x))
    half = polar.newton_schulz(x, Orthogonalize((1.0, 0.0, 0.0), 1, eps=norm))
    np.testing.assert_allclose(half, x / (2 * norm), rtol=1e-6)


@pytest.mark.parametrize("table", ["polar_express", "cubic"])
def test_traced_steps_give_the_same_as_static_ones(table):
    x = jax.random.normal(jax.random.key(1), (8, 12))
    for kind in (FastPolar, lambda options: options):
        traced = jax.jit(lambda x, n, kind=kind: kind(Orthogonalize(table, n))(x))
        for steps in (1, 5, 9):
            static = FastPolar(Orthogonalize(table, steps, polar="newton_schulz"))(x)
            np.testing.assert_allclose(traced(x, steps), static, atol=2e-5)
    with pytest.raises(ValueError, match="static_args"):
        jax.jit(lambda x, n: polar.newton_schulz(x, Orthogonalize("you", n)))(x, 5)


@pytest.mark.parametrize(
    ("table", "compute_dtype"),
    [(name, "bfloat16") for name in TABLES if name != "cans"]
    + [(name, "float16") for name in ("jordan", "polar_express", "cubic")],
)
def test_narrow_products_do_not_diverge(table, compute_dtype):
    """Many small matrices, half with rows of very different sizes: rounding is at its worst."""
    rng = np.random.default_rng(5)
    longest = max(TABLES[table], 8 if coefficients.TABLES[table].repeats_last else 0)
    runs = {TABLES[table], longest}
    for shape in ((4, 4), (3, 64)):
        x = rng.standard_normal((200, *shape))
        x[100:] *= rng.standard_normal((100, shape[0], 1)) ** 4
        x = jnp.asarray(x, jnp.float32)
        for steps in runs:
            result = polar.newton_schulz(
                x, Orthogonalize(table, steps, compute_dtype=compute_dtype)
            )
            # A full semi-orthogonal matrix has norm sqrt(min); the tables overshoot by a quarter.
            norms = np.linalg.norm(result, axis=(1, 2)) / np.sqrt(min(shape))
            assert np.isfinite(norms).all() and norms.max() < 1.3


@pytest.mark.cpu_program
def test_temporary_memory_does_not_grow_with_the_number_of_steps():
    """Of several matrices, whose iterations an unrolled program may interleave."""

    def temporary_bytes(steps):
        f = jax.jit(lambda xs: [polar.newton_schulz(x, Orthogonalize("jordan", steps)) for x in xs])
        compiled = f.lower([jax.ShapeDtypeStruct((64, 128), jnp.float32)] * 6).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(10) == temporary_bytes(3)


def test_polar_functions_act_on_stacks_of_any_rank():
    x = np.random.default_rng(16).normal(size=(2, 3, 5, 7)).astype(np.float32)
    newton_schulz, svd = omp.polar.newton_schulz(x, Orthogonalize("you", 4)), omp.polar.svd(x)
    for i in np.ndindex(2, 3):
        one = x[i].astype(np.float64)
        expected = reference.newton_schulz(one, "you", 4)
        np.testing.assert_allclose(newton_schulz[i], expected, atol=TOLERANCE)
        np.testing.assert_allclose(svd[i], reference.svd_polar(one), atol=TOLERANCE)
