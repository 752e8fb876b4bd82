"""Symmetric products: where the kernel is used, and what stands in for it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.symmetric_kernel import product, symmetric_product
from examples.compiled_programs import targets

NEW_JAX = jax.__version_info__ >= product.FIRST_JAX
needs_new_jax = pytest.mark.skipif(not NEW_JAX, reason="the kernel needs jax 0.11")


def gaussian(*shape, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def combined(a, b, addend, coefficients):
    """The formula in float64."""
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, addend))
    alpha, beta, gamma = np.moveaxis(np.asarray(coefficients, np.float64), -1, 0)[..., None, None]
    return alpha * (a @ np.swapaxes(b, -1, -2)) + beta * c + gamma * np.eye(c.shape[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_elsewhere_it_is_the_plain_product(dtype):
    a, coefficients = gaussian(2, 24, 40, dtype=dtype), gaussian(2, 3, dtype="float32")
    r = symmetric_product(a, a)
    assert r.dtype == dtype
    unit = jnp.finfo(dtype).eps
    np.testing.assert_allclose(r, combined(a, a, r, [[1, 0, 0]] * 2), rtol=unit)
    p = symmetric_product(r, r, r, coefficients)
    exact = combined(r, r, r, coefficients)
    assert np.max(np.abs(np.asarray(p, np.float64) - exact)) < 2 * unit * np.max(np.abs(exact))


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [(("9.0",), 132), (("9.0", "9.0"), None), (("8.0",), None), (("10.0",), None), ((None,), None)],
)
def test_the_kernel_is_for_one_hopper_gpu(monkeypatch, capabilities, found):
    gpus = [types.SimpleNamespace(compute_capability=c, core_count=132) for c in capabilities]
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert product.multiprocessors() == found
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert product.multiprocessors() is None


def test_the_kernel_is_for_blocks_and_steps_that_are_full():
    fits = product.fits
    assert fits((512, 64)) and fits((3, 256, 128))
    assert not any(fits(shape) for shape in [(500, 64), (512, 60), (0, 512, 64), (512, 0)])


@needs_new_jax
@pytest.mark.skipif(
    targets.missing(targets.parse("h100:1")) is not None,
    reason="needs requirements/cuda-compiler.txt",
)
def test_programs_for_an_h100_have_the_kernel(monkeypatch):
    """Lowered, not compiled. A kernel that is used several times is lowered once."""
    mesh = Mesh(targets.devices(targets.parse("h100:1")), "data")
    monkeypatch.setattr(product, "multiprocessors", lambda: 132)

    def products(x):
        r, coefficients = symmetric_product(x, x), jnp.ones((*x.shape[:-2], 3))
        return symmetric_product(r, symmetric_product(r, r, r, coefficients), r, coefficients)

    def kernels(side):
        sharding = NamedSharding(mesh, P())
        x = jax.ShapeDtypeStruct((8, side, 640), "bfloat16", sharding=sharding)
        return jax.jit(products).lower(x).as_text().count("@mosaic_gpu")

    assert kernels(512) == 2  # the two combinations are of one shape
    assert kernels(500) == 0


@pytest.mark.parametrize(
    ("sides", "padded"),
    [
        ((2048, 5461), (2048, 5504)),
        ((5461, 2048), (5504, 2048)),
        ((1000, 1000), (1024, 1024)),
        ((4096, 4096), (4096, 4096)),
        ((500, 4096), None),  # too small
        ((520, 4096), None),  # 768 rows would be more work than one triangle saves
    ],
)
def test_matrices_are_padded_for_it_where_that_pays(sides, padded):
    assert product.padded_sides(*sides) == padded
