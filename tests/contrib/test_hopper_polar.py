"""The polar function for Hopper: what it computes, when it is the plain iteration, its kernel.

The kernel runs in JAX's interpreter of Mosaic GPU. It is not public: its tests are for one version.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from optax_muonplus.contrib import _hopper_polar, hopper_polar
from optax_muonplus.polar import Orthogonalize, polar_factor
from tests.support.reference import newton_schulz

BF16 = Orthogonalize(compute_dtype="bfloat16")
INTERPRETED = pytest.mark.skipif(
    jax.__version__ != "0.12.0.1", reason="the interpreter of Mosaic GPU is that of jax 0.12.0.1"
)


def normal(*shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def distance(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


def polynomial(x, table, steps=5):
    matrices = np.asarray(x, np.float64).reshape(-1, *x.shape[-2:])
    return np.stack([newton_schulz(matrix, table, steps) for matrix in matrices]).reshape(x.shape)


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU, as far as gates know, and no lower bound of the short side."""
    monkeypatch.setattr(_hopper_polar, "SHORTEST", 1)
    monkeypatch.setattr(_hopper_polar, "cores_of_hopper", lambda: 4)
    monkeypatch.setattr(_hopper_polar, "on_its_platform", lambda kernel, plain, x: kernel(x))
    yield
    jax.clear_caches()  # of what was traced so


@pytest.fixture
def products(hopper, monkeypatch):
    """The shapes of products that were traced; they are computed as the kernel would."""
    seen = []

    def product(a, b, c=None, *, alpha=1.0, beta=0.0, symmetric=False, cores):
        del cores
        seen.append(a.shape)
        assert all(x.dtype == jnp.bfloat16 for x in (a, b))
        assert all(side % 256 == 0 for x in (a, b) for side in x.shape[1:])
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        made = alpha * (a @ (b.mT if symmetric else b))
        made += 0.0 if c is None else beta * c.astype(jnp.float32)
        return (jnp.tril(made) + jnp.tril(made, -1).mT if symmetric else made).astype(jnp.bfloat16)

    monkeypatch.setattr(_hopper_polar, "product", product)
    return seen


@pytest.mark.parametrize("shape", [(40, 72), (72, 40), (48, 48), (2, 3, 40, 72)])
@pytest.mark.parametrize("table", ["jordan", "polar_express"])
def test_the_polynomial_of_the_options(products, shape, table):
    options, x = Orthogonalize(table, compute_dtype="bfloat16"), normal(*shape)
    found = hopper_polar(options)(x)
    assert found.shape == x.shape and found.dtype == x.dtype and products
    expected = polynomial(x, table)
    assert distance(found, expected) < 1.2 * distance(polar_factor(x, options), expected)


def test_zeros_nan_and_the_scale_of_matrices(products):
    polar, x = hopper_polar(), normal(3, 16, 24)
    assert not polar(jnp.zeros((2, 16, 24))).any() and polar(jnp.zeros((2, 0, 24))).size == 0
    for factor in (2.0**-40, 2.0**40):
        np.testing.assert_array_equal(polar(factor * x), polar(x))
    assert jnp.isnan(polar(x.at[1, 2, 3].set(jnp.nan))).any((-2, -1)).tolist() == [0, 1, 0]


def test_vmap_makes_one_stack(products):
    x = normal(2, 3, 16, 24)
    found = jax.vmap(jax.vmap(hopper_polar(), in_axes=2, out_axes=2))(x.transpose(0, 2, 3, 1))
    assert products[-1][0] == 6  # traced last, for one batch of all
    np.testing.assert_array_equal(found.transpose(0, 3, 1, 2), hopper_polar()(x))


def test_derivatives_are_those_of_the_plain_iteration(products):
    x, cotangent = normal(2, 16, 24), normal(2, 16, 24, seed=1)
    for transform in (lambda f: f, jax.vmap):
        value, pull = jax.vjp(transform(hopper_polar(BF16)), x)
        plain, plain_pull = jax.vjp(lambda x: polar_factor(x, BF16), x)
        np.testing.assert_array_equal(value, plain)
        np.testing.assert_array_equal(pull(cotangent)[0], plain_pull(cotangent)[0])
    assert not products


def test_traced_options_are_those_of_the_plain_iteration(products):
    @jax.jacfwd
    def found(eps):
        options, x = BF16.replace(eps=eps), normal(8, 12)
        return hopper_polar(options)(x) - polar_factor(x, options)

    assert not jax.jit(found)(0.1).any() and not products


@pytest.mark.several_devices
@pytest.mark.parametrize("check_vma", [False, True])
def test_matrices_are_local_in_a_shard_map(products, check_vma):
    x, polar, mesh = normal(4, 16, 24), hopper_polar(), Mesh(jax.devices()[:2], ("data",))
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    found = jax.jit(jax.shard_map(polar, mesh=mesh, check_vma=check_vma, **specs))(x)
    assert products[-1][0] == 2
    np.testing.assert_allclose(found, polar(x), atol=1e-2)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "eligible"),
    [
        ((2, 2048, 5461), "float32", {}, True),
        ((4096, 2048), "bfloat16", {"polar": "newton_schulz"}, True),
        ((4096, 2047), "float32", {}, False),
        ((0, 2048, 2048), "float32", {}, False),
        ((2048, 2048), "float16", {}, False),
        ((2048, 2048), "float32", {"compute_dtype": None}, False),
        ((2048, 2048), "float32", {"ns_coeffs": "cubic"}, False),
        ((2048, 2048), "float32", {"polar": "gram"}, False),
        ((2048, 2048), "float32", {"preconditioning": "aol"}, False),
    ],
)
def test_what_the_kernel_computes(shape, dtype, options, eligible):
    options = Orthogonalize(**{"compute_dtype": "bfloat16"} | options)
    assert _hopper_polar.is_eligible(jax.ShapeDtypeStruct(shape, dtype), options) == eligible


HOPPER = ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H20"]
OTHERS = ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA GB200", "cpu", "TPU v5e", "NVIDIA L4"]


@pytest.mark.parametrize("kind", [*HOPPER, *OTHERS])
def test_devices_with_the_kernel(monkeypatch, kind):
    device = types.SimpleNamespace(device_kind=kind, core_count=132)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    expected = 132 if kind in HOPPER and jax.__version_info__ >= (0, 10, 2) else None
    assert _hopper_polar.cores_of_hopper() == expected


@pytest.mark.parametrize("pretends", [False, True])
def test_other_devices_get_the_plain_iteration(monkeypatch, pretends):
    """Also if JAX's default is a Hopper GPU, and the program is for another device."""
    monkeypatch.setattr(_hopper_polar, "SHORTEST", 1)
    if pretends:
        monkeypatch.setattr(_hopper_polar, "cores_of_hopper", lambda: 4)
        monkeypatch.setattr(_hopper_polar, "product", lambda a, b, *_, **__: a @ b)
    x, options = normal(2, 16, 16), Orthogonalize(compute_dtype="bfloat16")
    np.testing.assert_array_equal(jax.jit(hopper_polar(options))(x), polar_factor(x, options))


def test_another_polar_function_is_refused():
    with pytest.raises(ValueError, match=r"polar is the function .*sin.* Pass \"auto\""):
        hopper_polar(Orthogonalize(polar=jnp.sin))


@pytest.mark.parametrize("squares", range(1, 10))
def test_squares_cover_the_lower_triangle(squares):
    kernel = _hopper_polar.Product(1, 256 * squares, 64, 256 * squares, 1.0, 0.0, symmetric=True)
    row, column = jax.vmap(kernel.square)(jnp.arange(kernel.squares))
    found = sorted(zip(row.tolist(), column.tolist(), strict=True))
    assert found == [(i, j) for i in range(squares) for j in range(i + 1)]


@pytest.fixture
def interpreted(hopper, monkeypatch):
    """Runs kernels with small tiles on this CPU, and raises on a race."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
    from jax.experimental.pallas import mosaic_gpu as gpu

    monkeypatch.setattr(_hopper_polar, "TILE", 64)
    with gpu.force_gpu_interpret_mode(gpu.InterpretGPUParams(detect_races=True)):
        yield
    interpreter.reset_gpu_interpret_mode_state()  # a race has raised


@INTERPRETED
def test_products_are_exact_and_symmetric(interpreted):
    """Of a stack with tiles on, below and beside the diagonal, each cluster has several squares."""
    x = normal(2, 256, 128, dtype=jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    gram = _hopper_polar.product(x, x, symmetric=True, cores=4)
    g = gram / 128
    square = np.asarray(g, np.float64)
    product = functools.partial(_hopper_polar.product, alpha=2.0, beta=-1.5, cores=4)
    for found, expected in (
        (gram, wide @ wide.swapaxes(1, 2)),
        (product(g, g, g, symmetric=True), 2 * square @ square - 1.5 * square),
        (product(g, x, x), 2 * square @ wide - 1.5 * wide),
    ):
        # Sums in float32 are exact to 1e-6, and then rounded to bfloat16.
        bound = 2.0**-8 * np.abs(expected) + 1e-5 * np.abs(expected).max()
        assert (np.abs(np.asarray(found, np.float64) - expected) <= bound).all()
        if found.shape[-2] == found.shape[-1]:
            np.testing.assert_array_equal(found, jnp.swapaxes(found, 1, 2))


@INTERPRETED
@pytest.mark.parametrize("shape", [(2, 100, 150), (150, 100)])
def test_ragged_matrices_of_both_orientations(interpreted, shape):
    options = Orthogonalize(ns_steps=1, compute_dtype="bfloat16")
    x = normal(*shape)
    expected = polynomial(x, "jordan", steps=1)
    found = hopper_polar(options)(x)
    assert distance(found, expected) < 1.2 * distance(polar_factor(x, options), expected) < 0.01


@INTERPRETED
def test_training_is_that_of_the_plain_path(interpreted):
    """Of a linear map by 50 updates, each of which runs the three forms of the kernel."""
    options = Orthogonalize(ns_steps=1, compute_dtype="bfloat16")
    target, inputs = normal(64, 64), normal(128, 64, seed=1)

    def loss(w):
        return jnp.mean((inputs @ (w - target).T) ** 2)

    def train(**polar):
        tx = omp.muonplus(optax.linear_schedule(1.6, 0.0, 50), **polar)

        @jax.jit
        def step(w, state):
            value, gradient = jax.value_and_grad(loss)(w)
            update, state = tx.update(gradient, state, w)
            return optax.apply_updates(w, update), state, value

        w, state, values = jnp.zeros_like(target), tx.init(jnp.zeros_like(target)), []
        for _ in range(50):
            w, state, value = step(w, state)
            values.append(float(value))
        return np.array(values)

    found = train(polar=hopper_polar(options))
    plain = train(ns_steps=1, compute_dtype="bfloat16")
    assert plain[-1] < 0.02 * plain[0]
    np.testing.assert_allclose(found, plain, rtol=2e-3)
