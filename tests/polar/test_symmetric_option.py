"""`symmetric_kernel=True`: the products it is for, the results, and where it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus.polar import _newton_schulz, _symmetric_product
from tests.support import flat
from tests.support.half_precision import matrix, polynomial


def gaussian(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


needs_option = pytest.mark.usefixtures("accepted")


@pytest.fixture
def accepted(monkeypatch):
    """Matrices of any size take the path of the kernel, with any JAX."""
    monkeypatch.setattr(_symmetric_product, "FIRST_JAX", (0, 8))
    monkeypatch.setattr(_symmetric_product, "SMALLEST_SIDE", 8)
    monkeypatch.setattr(_symmetric_product.Tiling.__new__, "__defaults__", (4, 8, 4, 2))
    jax.clear_caches()
    yield
    jax.clear_caches()


@needs_option
@pytest.mark.parametrize("shape", [(2, 48, 100), (100, 48), (48, 48)])
@pytest.mark.parametrize("preconditioning", ["frobenius", "aol"])
def test_iterations_have_the_same_result_with_it(shape, preconditioning):
    """On a CPU the products are the plain ones, and so are all sums and roundings."""
    x = gaussian(*shape)
    options = {"compute_dtype": "bfloat16", "preconditioning": preconditioning}
    plain, ours = (
        omp.polar.newton_schulz(x, symmetric_kernel=kernel, **options) for kernel in (False, True)
    )
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
    bound = _symmetric_product._once

    def once(tiling, *operands):
        counted.append({2: "product", 4: "combination"}[len(operands)])
        return bound(tiling, *operands)

    monkeypatch.setattr(_symmetric_product, "_once", once)
    options = {"compute_dtype": "bfloat16", "symmetric_kernel": True}
    iteration = jax.jit(lambda x: omp.polar.newton_schulz(x, [row] * 2, 2, **options))
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
        triangle = jnp.tril(_symmetric_product.symmetric_product(*operands))
        return triangle + jnp.swapaxes(jnp.tril(triangle, -1), -1, -2)

    monkeypatch.setattr(_newton_schulz, "symmetric_product", mirrored)
    x = matrix("log", 96, 256)
    exact = polynomial(x, table, 5)
    x, exact = (x.T, exact.T) if transposed else (x, exact)
    gram = omp.polar.gram_newton_schulz(x, table, 5, compute_dtype=dtype, symmetric_kernel=True)
    plain = omp.polar.newton_schulz(x, table, 5, compute_dtype="bfloat16")
    assert np.linalg.norm(gram - exact) < allowed * np.linalg.norm(plain - exact)


@needs_option
@pytest.mark.parametrize(
    "build",
    [
        lambda **x: omp.muonplus(0.1, **x),
        lambda **x: omp.muon(0.1, polar="newton_schulz", **x),
        lambda **x: flat.normuon(0.1, **x),
        lambda **x: flat.adamuon(0.1, **x),
        lambda **x: flat.turbo_muon(0.1, **x),
        lambda **x: optax.inject_hyperparams(omp.muonplus)(0.1, **x),
        flat.orthogonalize,
    ],
)
def test_it_is_an_argument_of_links_and_optimizers(build):
    params = {"up": {"kernel": jnp.ones((48, 96))}}
    for symmetric_kernel in (True, False):
        tx = build(compute_dtype="bfloat16", symmetric_kernel=symmetric_kernel)
        program = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
        assert ("symmetric_product[" in program) == symmetric_kernel


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs products of half precision, got compute_dtype=None"),
        ({"compute_dtype": "float32"}, "got compute_dtype=float32. Pass compute_dtype='bfloat16'"),
        ({"compute_dtype": "complex64"}, "got compute_dtype=complex64"),
        ({"compute_dtype": "bfloat16", "polar": "svd"}, "polar='svd' does not have"),
        ({"compute_dtype": "bfloat16", "polar": jnp.sign}, "does not have"),
    ],
)
def test_where_it_can_have_no_effect_it_is_refused(arguments, message):
    for build in (flat.scale_by_muonplus, flat.orthogonalize):
        with pytest.raises(ValueError, match=message):
            build(symmetric_kernel=True, **arguments)


def test_older_versions_of_jax_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    with pytest.raises(ValueError, match=r"needs jax 0\.11 or newer.* this is 0\.10\.2"):
        omp.muonplus(0.1, compute_dtype="bfloat16", symmetric_kernel=True)
