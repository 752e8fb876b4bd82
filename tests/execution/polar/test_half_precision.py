"""Half precision: every product rounded once, no pass more than needed, as exact as can be.

Products of bfloat16 operands are exact in float32, so that a CPU computes what an accelerator does,
but for the order of the sums.
"""

import dataclasses
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus._execution.polar.iteration import iterate
from optax_muonplus.polar import FastPolar, Orthogonalize
from tests.support import polar, reference
from tests.support.half_precision import matrix, polynomial
from tests.support.platforms import LESS_EXACT

TABLES = {"jordan": 5, "you": 5, "dion": 5, "polar_express": 5, "cubic": 5}
STEPS = {**TABLES, "you": 6, "polar_express": 6}  # the usual ones
GRAM_RUNS = [
    *(("jordan", steps) for steps in (5, 6)),
    *(("you", 5), ("dion", 5)),
    *(("cubic", steps) for steps in (4, 5, 6, 7, 8)),
]
TALL_RUNS = (("jordan", 5), ("cubic", 8))  # the same code with the factors in another order
SPECTRA = ("gaussian", "log", "rank 10", "log to 1e-7", "two large")


@pytest.mark.parametrize("spectrum", ["gaussian", "log", "rank 10"])
@pytest.mark.parametrize("table", TABLES)
def test_as_near_to_the_polynomial_as_products_rounded_once(table, spectrum):
    x = matrix(spectrum)
    exact = polynomial(x, table, TABLES[table])
    once = polynomial(
        x, table, TABLES[table], lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64)
    )
    ours = polar.plain(x, Orthogonalize(table, TABLES[table], compute_dtype="bfloat16"))
    # Sums in float32 in place of float64, and another power of two before the first rounding: the
    # errors are other random numbers of the same size, which differ by a third in these matrices.
    size = np.linalg.norm(exact)
    limit = 1.35 * LESS_EXACT
    assert np.linalg.norm(ours - exact) / size < limit * np.linalg.norm(once - exact) / size


@functools.cache
def of_all_spectra(n, m):
    return jnp.stack([matrix(spectrum, n, m) for spectrum in SPECTRA])


@pytest.mark.parametrize("table, steps", GRAM_RUNS)
def test_bfloat16_gram_is_as_near_to_the_polynomial_as_plain_bfloat16(table, steps):
    assert omp.coefficients.TABLES[table].restarts(steps).bfloat16 != tuple(range(1, steps))
    # Wide and tall: factors of products must stand in the right order on both sides.
    sides = [((64, 192), False), ((48, 256), True)]
    for shape, tall in sides[: 1 + ((table, steps) in TALL_RUNS)]:
        xs = of_all_spectra(*shape)
        exact = np.stack([polynomial(x, table, steps) for x in xs])
        # The scale decides how the diagonal of the first polynomial is rounded, which moves all
        # singular values alike: the distances of one scale differ by a fifth by that alone.
        scales = jnp.geomspace(1, 2, 8, endpoint=False)[:, None, None, None]
        scaled = scales * (jnp.swapaxes(xs, -1, -2) if tall else xs)[None]
        gram, plain = (
            np.asarray(form(scaled, Orthogonalize(table, steps, compute_dtype="bfloat16")))
            for form in (polar.gram, polar.plain)
        )
        exact = np.swapaxes(exact, -1, -2) if tall else exact
        squares = [
            np.sum((np.asarray(found) - exact) ** 2, axis=(0, -2, -1)) for found in (gram, plain)
        ]
        ratios = np.sqrt(squares[0] / squares[1])
        # Both errors are sums of random numbers. Found: at most 1.06.
        assert ratios.max() < 1.1, (shape, dict(zip(SPECTRA, ratios, strict=True)))


def test_restarts_of_the_default_table_are_enough_for_a_large_matrix():
    """With the second one alone the Gram form is 1.3 times as far as the plain one here."""
    x = jax.random.normal(jax.random.key(0), (256, 1024))
    exact = polynomial(x, "jordan", 5)
    options = Orthogonalize(compute_dtype="bfloat16")
    errors = [np.linalg.norm(form(x, options) - exact) for form in (polar.gram, polar.plain)]
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize("table", ["jordan", "you", "dion"])
def test_squares_of_the_bfloat16_gram_form_are_not_rounded(table):
    """That is felt where singular values are equal in pairs: 1.13 to 1.5 times the distance."""
    x = jnp.geomspace(1, 2, 8, endpoint=False)[:, None, None] * matrix("pairs", 64, 192)[None]
    exact = polynomial(x[0], table, 5)[None]
    gram, plain = (
        np.linalg.norm(form(x, Orthogonalize(table, compute_dtype="bfloat16")) - exact)
        for form in (polar.gram, polar.plain)
    )
    assert gram < 1.07 * plain  # found: at most 1.01


def test_bfloat16_gram_is_plain_where_it_would_be_less_exact():
    x = matrix("gaussian", 8, 24)
    for table, steps in (("polar_express", 5), ("jordan", 8)):
        gram = polar.gram(x, Orthogonalize(table, steps, compute_dtype="bfloat16"))
        auto = FastPolar(Orthogonalize(table, steps, compute_dtype="bfloat16"))(x)
        plain = polar.plain(x, Orthogonalize(table, steps, compute_dtype="bfloat16"))
        np.testing.assert_array_equal(auto, plain)
        np.testing.assert_array_equal(gram, plain)


def test_auto_takes_the_form_with_fewer_operations():
    """A segment of s steps has 2 products with the long side, s squares and 3 (s - 1) others."""
    segments = 3
    for table, squares in (("jordan", 5), ("cubic", 0)):
        factor = FastPolar(Orthogonalize(table, compute_dtype="bfloat16"))
        short = squares + 3 * (5 - segments)  # products of n x n matrices
        assert factor.flops((64, 256)) == 2 * 64**2 * (2 * segments * 256 + short * 64)
        assert factor.flops((64, 64)) == 2 * 64**3 * (10 + squares)


@pytest.mark.parametrize("polar", ["gram", "newton_schulz"])
def test_cubics_keep_the_sign_of_matrices_of_rank_one(polar):
    """Their norm is their singular value, which cubics take to 0.02, or rounded up below 0."""
    scales = np.linspace(1, 2, 40, dtype=np.float32)[:, None, None]
    x = jnp.asarray(scales * np.ones((8, 64), np.float32))
    found = FastPolar(Orthogonalize("cubic", polar=polar, compute_dtype="bfloat16"))(x)
    values = np.asarray(found, np.float64).mean(axis=(1, 2)) * np.sqrt(8 * 64)
    assert values.min() > 0.7 and values.max() < 1.31


@pytest.mark.parametrize("table", STEPS)
def test_narrow_products_do_not_diverge(table):
    """Many small matrices, half with rows of very different sizes: rounding is at its worst."""
    rng = np.random.default_rng(5)
    longest = max(STEPS[table], 8 if omp.coefficients.TABLES[table].repeats_last else 0)
    runs = {STEPS[table], longest}
    for shape in ((4, 4), (3, 64)):
        x = rng.standard_normal((200, *shape))
        x[100:] *= rng.standard_normal((100, shape[0], 1)) ** 4
        x = jnp.asarray(x, jnp.float32)
        for steps in runs:
            result = polar.plain(x, Orthogonalize(table, steps, compute_dtype="bfloat16"))
            # A full semi-orthogonal matrix has norm sqrt(min); the tables overshoot by a quarter.
            norms = np.linalg.norm(result, axis=(1, 2)) / np.sqrt(min(shape))
            assert np.isfinite(norms).all() and norms.max() < 1.3


def gpu_program(function, *shapes):
    """What is given to the compiler of a GPU; needs none."""
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.export.export(jax.jit(function), platforms=["cuda"])(*specs).mlir_module()


def plain_on_a_gpu(dtype):
    return FastPolar(Orthogonalize(compute_dtype=dtype, polar="newton_schulz"), "gpu")


def results(program, operation):
    """The type of the result of each operation of that name, which ends its line."""
    lines = [line for line in program.splitlines() if f"stablehlo.{operation}" in line]
    return [re.findall(r"tensor<([^>]*)>", line)[-1] for line in lines]


def stacks(program):
    """Arrays that are joined of matrices, not of one number for each row."""
    return [array for array in results(program, "concatenate") if "x1x" not in array]


def test_products_leave_in_half_precision_on_a_gpu():
    program = gpu_program(plain_on_a_gpu("bfloat16"), (24, 64))
    products = results(program, "dot_general")
    assert len(products) == 15  # R, R^2 and P Y, five times
    assert {product.split("x")[-1] for product in products} == {"bf16"}


def test_the_long_side_is_padded_once_and_rounded_once_on_a_gpu():
    program = gpu_program(plain_on_a_gpu("bfloat16"), (20, 61))
    assert results(program, "pad") == ["24x64xbf16"]
    rounded = results(program, "reduce_precision")
    assert [shape for shape in rounded if "61" in shape or "64" in shape] == ["20x61xf32"]


def test_the_gram_matrix_is_read_by_products_and_polynomials_only_on_a_gpu():
    """Its norm takes the diagonal, and the first polynomial has the norm in its coefficients."""
    program = gpu_program(plain_on_a_gpu("bfloat16"), (24, 64))
    assert results(program, "reduce_precision").count("24x24xf32") == 1  # the first polynomial
    assert "24xbf16" in results(program, "slice")


def test_later_polynomials_change_two_diagonals_each_on_a_gpu():
    """A pass over R and R^2 would write a third matrix in place of that."""
    for table, changes in (("jordan", 8), ("cubic", 0)):
        options = Orthogonalize(table, 5, compute_dtype="bfloat16", polar="newton_schulz")
        program = gpu_program(FastPolar(options, "gpu"), (2, 24, 24))
        assert results(program, "slice").count("2x24xbf16") == 1 + changes
        assert len(re.findall('stablehlo.scatter"', program)) == changes
        # The diagonal is taken before it is changed, else XLA would change a copy.
        assert len(re.findall("stablehlo.optimization_barrier ", program)) == changes // 2


@pytest.mark.parametrize("table", TABLES)
def test_the_iteration_of_a_gpu_is_as_near_to_the_polynomial(table):
    """Its operations in its order; products are exact in float32, where a CPU can make them."""
    options = Orthogonalize(table, TABLES[table], compute_dtype="bfloat16")
    scales = jnp.geomspace(1, 2, 8, endpoint=False)[:, None, None, None]
    for shape in ((64, 64), (64, 192)):
        xs = jnp.stack([matrix(spectrum, *shape) for spectrum in SPECTRA])
        exact = np.stack([polynomial(x, table, TABLES[table]) for x in xs])
        squares = []
        for platform in ("gpu", "cpu"):
            iteration = FastPolar(options).iteration(platform, shape, jnp.float32)
            products = dataclasses.replace(iteration.products, upcast_operands=True)
            iteration = dataclasses.replace(iteration, products=products)
            found = iterate(scales * xs[None], 0.0, iteration)
            squares.append(np.sum((np.asarray(found) - exact) ** 2, axis=(0, -2, -1)))
        # Found: at most 1.03.
        assert np.sqrt(squares[0] / squares[1]).max() < 1.1, shape


def test_rows_that_end_in_one_are_scaled_in_the_first_step_on_a_gpu():
    """Later steps complete the square of such rows, for which the Gram matrix must be scaled."""
    x = 3 * matrix("gaussian", 64, 64)
    for steps in (1, 3):
        options = Orthogonalize([(2.0, -2.0, 1.0)] * steps, steps, compute_dtype="bfloat16")
        iteration = FastPolar(options).iteration("gpu", x.shape, jnp.float32)
        products = dataclasses.replace(iteration.products, upcast_operands=True)
        found = iterate(x[None], 0.0, dataclasses.replace(iteration, products=products))[0]
        expected = Orthogonalize([(2.0, -2.0, 1.0)] * steps, steps)(x)
        assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


# All singular values equal, equal in pairs, and those of a Gaussian matrix.
EQUAL = ("equal", "pairs", "gaussian")
STEEP = [
    *((table, norm) for table in ("polar_express", "cubic") for norm in ("aol", "spectral")),
    ("dion", "aol"),
]


@pytest.mark.parametrize("table, norm", STEEP)
def test_norms_are_of_matrices_that_are_not_rounded_where_that_is_felt(table, norm):
    """Equal values become 1, where the first polynomials are steep: a norm that was 0.2% too large,
    by the noise of rounded matrices, moved results by 0.1 to 0.28."""
    for shape in ((24, 24), (64, 192), (256, 1024))[: 3 if norm == "aol" else 2]:
        x = np.stack([1.4 * matrix(spectrum, *shape) for spectrum in EQUAL])
        exact = [reference.newton_schulz(np.float64(y), table, 5, norm) for y in x]
        options = Orthogonalize(table, 5, preconditioning=norm, compute_dtype="bfloat16")
        assert options.input_dtype is None
        for form, platform in (("auto", "cpu"), ("gram", "gpu")):
            factor = FastPolar(dataclasses.replace(options, polar=form))
            iteration = factor.iteration(platform, shape, jnp.float32)
            products = dataclasses.replace(iteration.products, upcast_operands=True)
            found = iterate(x, 0.0, dataclasses.replace(iteration, products=products))
            for spectrum, y, wanted in zip(EQUAL, found, exact, strict=True):
                # Found: at most 0.017 where all are equal, and 0.045; the definition has 0.13.
                limit = 0.025 if spectrum == "equal" else 0.06
                distance = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
                assert distance < limit, (shape, platform, spectrum, distance)


def test_the_exact_norm_takes_no_further_product():
    options = Orthogonalize("polar_express", preconditioning="aol", compute_dtype="bfloat16")
    for platform in ("cpu", "gpu", "tpu"):
        lines = str(jax.make_jaxpr(FastPolar(options, platform))(jnp.ones((24, 64))))
        assert lines.count("dot_general[") == 15
    usual = Orthogonalize("jordan", preconditioning="aol", compute_dtype="bfloat16")
    assert usual.input_dtype == jnp.bfloat16


def test_stacks_are_copied_in_half_precision_on_a_gpu():
    tree = {f"layer_{i}": {"kernel": (64, 24)} for i in range(3)}
    tx = omp.scale_by_muonplus(compute_dtype="bfloat16")

    def update(*grads):
        grads = {name: {"kernel": g} for name, g in zip(tree, grads, strict=True)}
        return tx.update(grads, tx.init(grads))[0]

    program = gpu_program(update, *[(64, 24)] * 3)
    assert stacks(program) == ["3x64x24xbf16"]


@pytest.mark.parametrize("nesterov", [True, False])
def test_stacks_are_read_from_stored_momentum_on_a_gpu(nesterov):
    """Else XLA would compute it again from the momentum before, and keep that."""
    tree = {f"layer_{i}": {"kernel": jnp.zeros((64, 24), jnp.bfloat16)} for i in range(3)}
    tx = omp.scale_by_muonplus(compute_dtype="bfloat16", nesterov=nesterov)
    update = jax.export.export(jax.jit(tx.update), platforms=["cuda"])
    program = update(tree, tx.init(tree)).mlir_module()
    kept = re.findall(r"optimization_barrier .* : (.*)$", program, re.M)
    both = ["tensor<1x64x24xbf16>"] * (2 if nesterov else 1)  # momentum, and the gradient
    found = [re.findall(r"tensor<1x64x24x\w+>", line) for line in kept]
    assert [arrays for arrays in found if arrays] == [both] * 3
    assert stacks(program) == ["3x64x24xbf16"]


def test_largest_values_are_found_where_the_momentum_is_made_on_a_gpu():
    """Row by row in the pass that writes it; of a whole stack, a pass would read it once more."""
    tree = {f"layer_{i}": {"kernel": jnp.zeros((64, 24), jnp.bfloat16)} for i in range(3)}
    tx = omp.scale_by_muonplus(compute_dtype="bfloat16", norm="none")
    program = jax.export.export(jax.jit(tx.update), platforms=["cuda"])(tree, tx.init(tree))
    lines = re.findall(r"stablehlo.reduce\(.*stablehlo.maximum.*", program.mlir_module())
    found = [re.search(r"\(tensor<([^>]*)>", line)[1] for line in lines]
    assert found == [*["1x64x24xf32"] * 3, "3x64x1xf32"]


def test_largest_values_that_are_known_change_nothing():
    x = jnp.stack([matrix("gaussian"), 1e-30 * matrix("log"), 1e30 * matrix("rank 10")])
    x = x.astype(jnp.bfloat16)
    known = jnp.max(jnp.abs(x), (-2, -1), keepdims=True)
    factor = FastPolar(Orthogonalize(compute_dtype="bfloat16"))
    np.testing.assert_array_equal(jax.jit(factor)(x), jax.jit(factor.replace(largest=known))(x))


def test_layers_of_one_leaf_are_slices_in_one_loop_on_a_gpu(monkeypatch):
    """Written out, slices of 24 layers of LLaMA-1B took 1.2 GB beside the parameters; now 0.3."""
    monkeypatch.setattr("optax_muonplus._execution.device.gpu.STACK_BYTES", 2 * 24 * 64 * 4)
    dims = {"scanned": omp.MuonDimensionNumbers(1, 2)}
    tx = omp.scale_by_muonplus(
        compute_dtype="bfloat16", where=omp.Matrices(weight_dimension_numbers=dims)
    )

    def update(grads):
        return tx.update({"scanned": grads}, tx.init({"scanned": grads}))[0]

    program = gpu_program(update, (5, 24, 64))
    (loop,) = re.findall(r"stablehlo.while\(.*", program)
    assert "tensor<4x24x64xf32>" in loop  # what it reads; the fifth is worked on after it
    # Directions are made and rounded slice by slice.
    assert "4x24x64xbf16" not in program and "5x24x64xbf16" not in program
    assert "-> tensor<2x24x24xbf16>" in program and "-> tensor<24x24xbf16>" in program
