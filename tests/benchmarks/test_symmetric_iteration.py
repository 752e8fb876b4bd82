"""The polar factor with one triangle: its products, results, and where it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from benchmarks import symmetric_kernel
from benchmarks.symmetric_kernel import OneTriangle, orthogonalize, product
from examples.compiled_programs import gpu, hlo, targets, walk
from optax_muonplus.polar import Orthogonalize
from tests.support.half_precision import matrix, polynomial


def gaussian(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


needs_option = pytest.mark.usefixtures("accepted")


@pytest.fixture
def accepted(monkeypatch):
    """Matrices of any size take the path of the kernel, with any JAX."""
    for module in (product, orthogonalize):
        monkeypatch.setattr(module, "FIRST_JAX", (0, 8))
        monkeypatch.setattr(module, "SMALLEST_SIDE", 8)
    monkeypatch.setattr(symmetric_kernel.Tiling.__new__, "__defaults__", (4, 8, 4, 2))
    jax.clear_caches()
    yield
    jax.clear_caches()


@needs_option
@pytest.mark.parametrize("shape", [(2, 48, 100), (100, 48), (48, 48)])
@pytest.mark.parametrize("preconditioning", ["frobenius", "aol"])
def test_iterations_have_the_same_result_with_it(shape, preconditioning):
    """On a CPU the products are the plain ones, and so are all sums and roundings."""
    x = gaussian(*shape)
    options = Orthogonalize(
        polar="newton_schulz", compute_dtype="bfloat16", preconditioning=preconditioning
    )
    plain, ours = omp.polar.FastPolar(options)(x), OneTriangle(options)(x)
    # But for the order of sums, where padding changes it, and that of two factors in float32.
    assert np.linalg.norm(ours - plain) < 2e-3 * np.linalg.norm(plain)


@needs_option
@pytest.mark.parametrize(
    ("row", "kernels"),
    [
        ((1.5, -0.5), ["product"]),  # X X^T
        ((2.0, -1.5, 0.5), ["product", "combination"]),  # and R^2, with its polynomial
        ((2.2, -1.9, 0.8, -0.1), ["product"] * 3),  # and R^2 and R^3
    ],
)
def test_all_symmetric_products_of_an_iteration_are_left_to_it(monkeypatch, row, kernels):
    counted = []
    bound = product._once

    def once(tiling, count, *operands):
        counted.append({2: "product", 4: "combination"}[len(operands)])
        return bound(tiling, count, *operands)

    monkeypatch.setattr(product, "_once", once)
    options = Orthogonalize([row] * 2, 2, polar="newton_schulz", compute_dtype="bfloat16")
    iteration = jax.jit(OneTriangle(options, "gpu"))
    text = iteration.lower(gaussian(48, 96)).as_text()
    assert counted == kernels * 2
    # P X is not symmetric. The two steps have their symmetric products in common.
    assert text.count("dot_general") == 2 + len({*kernels}) + (len(row) == 4)


@needs_option
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "dtype, table, allowed", [("float16", "polar_express", 0.5), ("bfloat16", "jordan", 1.1)]
)
def test_gram_with_one_triangle_is_as_near_as_plain_bfloat16(
    monkeypatch, dtype, table, allowed, transposed
):
    """The kernel computes a triangle and mirrors it, which moves errors to the other side."""

    def mirrored(*operands):
        triangle = jnp.tril(symmetric_kernel.symmetric_product(*operands))
        return triangle + jnp.swapaxes(jnp.tril(triangle, -1), -1, -2)

    monkeypatch.setattr(orthogonalize, "symmetric_product", mirrored)
    x = matrix("log", 96, 256)
    exact = polynomial(x, table, 5)
    x, exact = (x.T, exact.T) if transposed else (x, exact)
    gram = OneTriangle(Orthogonalize(table, polar="gram", compute_dtype=dtype))(x)
    plain = omp.polar.polar_factor(x, Orthogonalize(table, compute_dtype="bfloat16"))
    assert np.linalg.norm(gram - exact) < allowed * np.linalg.norm(plain - exact)


@pytest.mark.skipif(
    targets.missing(targets.parse("h100:1")) is not None or jax.__version_info__ < (0, 11),
    reason="needs requirements/cuda-compiler.txt, and jax 0.11 for the kernel",
)
def test_the_kernel_is_compiled_and_counted(monkeypatch):
    monkeypatch.setattr(product, "multiprocessors", lambda: 132)
    target = targets.parse("h100:1")
    sharding = NamedSharding(Mesh(targets.devices(target), "data"), P())
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=sharding)
    lowered = jax.jit(OneTriangle(Orthogonalize(compute_dtype="bfloat16"))).lower(x)
    compiled = lowered.compile(compiler_options=target.compiler_options)
    work = gpu.most_work(hlo.read_program(compiled, scopes=True), target.rates)
    # Two of each three products have 3 of 4 blocks.
    assert walk.total(work, "operations") == 5 * (1 + 2 * 3 / 4) * 2 * 512**3
