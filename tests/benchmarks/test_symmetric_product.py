"""Symmetric products: where the kernel is used, what stands in for it, and derivatives."""

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


def test_it_maps_over_stacks():
    a, coefficients = gaussian(2, 3, 24, 40), gaussian(3, 3, dtype="float32")
    mapped = jax.vmap(symmetric_product, in_axes=1, out_axes=1)
    r = symmetric_product(a, a)
    np.testing.assert_array_equal(mapped(a, a), r)
    mapped = jax.vmap(symmetric_product, in_axes=(0, 0, 0, None))
    both = jnp.broadcast_to(coefficients, (2, 3, 3))
    np.testing.assert_array_equal(mapped(r, r, r, coefficients), symmetric_product(r, r, r, both))


def test_its_derivative_is_that_of_the_formula():
    a = gaussian(24, 24, dtype="float16") / 8
    coefficients = jnp.array([2.0, -1.5, 0.5])

    def ours(a, coefficients):
        return symmetric_product(a, a, a, coefficients).astype(jnp.float32)

    def formula(a, coefficients):
        a = a.astype(jnp.float32)
        alpha, beta, gamma = coefficients
        return alpha * a @ a.T + beta * a + gamma * jnp.eye(24)

    def derivatives(f):
        tangent, back = jax.jvp(f, *[(a, coefficients)] * 2)[1], jax.vjp(f, a, coefficients)[1]
        return tangent, *back(gaussian(24, 24, dtype="float32"))

    ours, formula = (jax.jit(derivatives, static_argnums=0)(f) for f in (ours, formula))
    for got, wanted in zip(ours, formula, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-3 * jnp.max(jnp.abs(wanted)))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ([("float32", 4, 6), ("float32", 4, 6)], "of one dtype, bfloat16 or float16; got float32"),
        ([("bfloat16", 4, 6), ("float16", 4, 6)], "got bfloat16, float16"),
        ([("bfloat16", 4, 6), ("bfloat16", 6, 6)], r"needs shapes .* got \(\(4, 6\), \(6, 6\)\)"),
        ([("bfloat16", 4, 4)] * 3, "both addend and coefficients, or neither"),
        ([("bfloat16", 2, 4, 4)] * 3 + [("float32", 3)], "needs shapes"),
    ],
)
def test_operands_that_do_not_fit_raise(operands, message):
    with pytest.raises(ValueError, match=message):
        symmetric_product(*(jnp.zeros(shape, dtype) for dtype, *shape in operands))


def module(capabilities=("9.0", "9.0"), devices=1, manual=None, export=False, backend=True):
    """What JAX tells a lowering rule of the program and its devices."""
    gpus = [types.SimpleNamespace(compute_capability=c, core_count=132) for c in capabilities]
    axes = types.SimpleNamespace(num_devices=devices)
    if manual is not None:
        mesh = types.SimpleNamespace(shape={"data": 4, "model": 2, "one": 1})
        axes = types.SimpleNamespace(mesh=mesh, manual_axes=manual)
    return types.SimpleNamespace(
        backend=types.SimpleNamespace(devices=lambda: gpus) if backend else None,
        axis_context=axes,
        lowering_parameters=types.SimpleNamespace(for_export=export),
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, 132),
        ({"manual": {"data", "model"}}, 132),  # inside jax.shard_map
        ({"manual": {"data"}}, None),  # "model" is left to XLA, which cannot cut the kernel
        ({"devices": 2}, None),
        ({"capabilities": ("8.0",)}, None),
        ({"capabilities": ("10.0",)}, None),
        ({"capabilities": ("9.0", "8.9")}, None),
        ({"capabilities": (None,)}, None),  # devices that are no CUDA devices
        ({"export": True}, None),
        ({"backend": False}, None),
    ],
)
def test_the_kernel_is_for_hopper_and_one_device(monkeypatch, given, found):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert product._multiprocessors(module(**given)) == found
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert product._multiprocessors(module(**given)) is None


def test_the_kernel_is_for_blocks_and_steps_that_are_full():
    fits = product.fits
    assert fits((512, 64)) and fits((3, 256, 128))
    assert not any(fits(shape) for shape in [(500, 64), (512, 60), (0, 512, 64), (512, 0)])


@needs_new_jax
@pytest.mark.skipif(
    targets.missing(targets.parse("h100:1")) is not None, reason="needs the extra cuda-compiler"
)
def test_programs_for_an_h100_have_the_kernel_where_it_can_run():
    """Lowered, not compiled. A kernel that is used several times is lowered once."""
    devices = targets.devices(targets.parse("h100:8"))

    def products(x):
        r, coefficients = symmetric_product(x, x), jnp.ones((*x.shape[:-2], 3))
        return symmetric_product(r, symmetric_product(r, r, r, coefficients), r, coefficients)

    def kernels(function, mesh, spec, side=512):
        sharding = NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct((8, side, 640), "bfloat16", sharding=sharding)
        return jax.jit(function).lower(x).as_text().count("@mosaic_gpu")

    one, all_of_them = Mesh(devices[:1], "data"), Mesh(devices, "data")
    mapped = jax.shard_map(products, mesh=all_of_them, in_specs=P("data"), out_specs=P("data"))
    assert kernels(products, one, P()) == 2  # the two combinations are of one shape
    assert kernels(mapped, all_of_them, P("data")) == 2
    assert kernels(products, all_of_them, P("data")) == 0  # left to XLA
    assert kernels(products, one, P(), side=500) == 0


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
