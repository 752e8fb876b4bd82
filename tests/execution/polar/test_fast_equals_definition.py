"""The fast polar factor gives the numbers of the definition, for every choice and platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muonplus import polar
from optax_muonplus._execution.polar import products
from optax_muonplus.polar import FastPolar, Orthogonalize
from tests.support import reference
from tests.support.oracle_runs import TOLERANCE

SHAPES = [(16, 40), (28, 20), (16, 16)]
OPTIONS = {
    "auto": {},
    "one step": {"ns_steps": 1},
    "plain": {"polar": "newton_schulz"},
    "gram": {"polar": "gram"},
    "restarts": {"ns_coeffs": "polar_express", "ns_steps": 8, "polar": "gram"},
    "cubic": {"ns_coeffs": "cubic"},
    "safety factor": {"ns_coeffs": "polar_express", "polar": "newton_schulz"},
    "degree 7": {"ns_coeffs": (35 / 16, -35 / 16, 21 / 16, -5 / 16), "ns_steps": 4},
    "eps": {"eps": 3.0},
    **{name: {"preconditioning": name} for name in ("spectral", "schatten", "aol")},
    "aol, gram": {"preconditioning": "aol", "polar": "gram"},
}


def gaussian(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), (2, *shape))


# What rounding of 6e-8 becomes, where slopes at small singular values or coefficients are large.
ATOL = {"restarts": 2e-4, "gram": 1e-4, "degree 7": 5e-4}


@pytest.mark.parametrize(
    "name, platform", [("auto", "gpu"), *((x, y) for x in OPTIONS for y in ("cpu", "tpu"))]
)
def test_float32(name, platform, monkeypatch):
    """Sides of 20 and 28 are both padded to 32 on a TPU."""
    monkeypatch.setattr(products, "TPU_BLOCK", 16)
    options = Orthogonalize(**OPTIONS[name])
    fast = jax.jit(FastPolar(options, platform))
    for shape in SHAPES:
        x = gaussian(shape)
        np.testing.assert_allclose(fast(x), options(x), atol=ATOL.get(name, 2e-5))


@pytest.mark.parametrize("name", ["plain", "auto", "cubic", "aol"])
def test_half_precision(name):
    """Errors are of the size of the dtype's digits in both; each product is rounded once."""
    exact = Orthogonalize(**OPTIONS[name])
    options = Orthogonalize(**OPTIONS[name], compute_dtype="bfloat16")
    for shape in ((48, 160), (160, 48)):
        x = gaussian(shape)
        found, defined, wide = (f(x) for f in (FastPolar(options), options, exact))
        size = jnp.linalg.norm(wide)
        errors = [float(jnp.linalg.norm(y - wide) / size) for y in (found, defined)]
        assert max(errors) < 3e-2 and min(errors) > 6e-4
        assert 0.5 < errors[0] / errors[1] < 2


def test_complex_and_narrow_matrices():
    z = jax.lax.complex(gaussian((16, 40)), gaussian((16, 40), 1))
    np.testing.assert_allclose(FastPolar(Orthogonalize())(z), Orthogonalize()(z), atol=2e-5)
    narrow = gaussian((16, 40)).astype(jnp.bfloat16)
    found, expected = FastPolar(Orthogonalize())(narrow), Orthogonalize()(narrow)
    assert found.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype("float32"), expected.astype("float32"), atol=2**-8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_the_largest_and_the_smallest_numbers_of_a_dtype(dtype):
    signs = jnp.sign(gaussian((6, 10))).astype(dtype)
    fast = FastPolar(Orthogonalize(eps=0.0))
    expected = np.complex64(fast(signs))
    for size in (jnp.finfo(dtype).max, jnp.finfo(dtype).tiny):
        found = fast(signs * jnp.asarray(size, dtype))
        np.testing.assert_allclose(np.complex64(found), expected, atol=2**-7)


def test_zeros_give_zeros_and_the_derivative_zero():
    zero = jnp.zeros((4, 6))
    for function in (Orthogonalize(), FastPolar(Orthogonalize())):
        assert not jnp.any(function(zero))
        _, tangent = jax.jvp(function, (zero,), (jnp.ones_like(zero),))
        assert not jnp.any(tangent)


@pytest.mark.parametrize("table", ["polar_express", "cubic"])
def test_traced_steps_give_the_same_as_static_ones(table):
    x = gaussian((8, 12))
    for kind in (FastPolar, lambda options: options):
        traced = jax.jit(lambda x, n, kind=kind: kind(Orthogonalize(table, n))(x))
        for steps in (1, 5, 9):
            static = FastPolar(Orthogonalize(table, steps, polar="newton_schulz"))(x)
            np.testing.assert_allclose(traced(x, steps), static, atol=2e-5)
    with pytest.raises(ValueError, match="static_args"):
        jax.jit(lambda x, n: polar.polar_factor(x, Orthogonalize("you", n)))(x, 5)


def test_stacks_of_any_rank():
    x = np.random.default_rng(16).normal(size=(2, 3, 5, 7)).astype(np.float32)
    newton_schulz, svd = polar.polar_factor(x, Orthogonalize("you", 4)), polar.svd(x)
    for i in np.ndindex(2, 3):
        one = x[i].astype(np.float64)
        expected = reference.newton_schulz(one, "you", 4)
        np.testing.assert_allclose(newton_schulz[i], expected, atol=TOLERANCE)
        np.testing.assert_allclose(svd[i], reference.svd_polar(one), atol=TOLERANCE)
