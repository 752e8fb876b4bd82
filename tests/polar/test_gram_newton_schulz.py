"""Gram Newton-Schulz: the same polynomial as the plain iteration, with fewer operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.reference import newton_schulz as reference_newton_schulz

from optax_muonplus import coefficients, polar
from optax_muonplus.coefficients import _restarts as restarts
from optax_muonplus.polar import _newton_schulz as newton_schulz

# Every table with every number of steps from its usual one to the longest listed.
RUNS = [
    *(("jordan", steps) for steps in (5, 6, 8)),
    *(("you", steps) for steps in (5, 6)),
    ("dion", 5),
    ("turbo", 4),
    *(("polar_express", steps) for steps in (5, 6, 8)),
    *(("cans", steps) for steps in (5, 6, 8)),
]
KINDS = ("newton_schulz", "gram", "auto")


def gaussian(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def log_spaced(shape, smallest):
    """Singular values log-spaced from 1 to ``smallest``."""
    u, _, vh = np.linalg.svd(gaussian(shape), full_matrices=False)
    return u * np.logspace(0, np.log10(smallest), min(shape)) @ vh


def results(x, table, steps, kinds=KINDS, **options):
    """Of each kind, in one program."""
    x = jnp.asarray(x)

    def each(x):
        return {kind: polar.polar_function(kind, table, steps, **options)(x) for kind in kinds}

    return {kind: np.asarray(y) for kind, y in jax.jit(each)(x).items()}


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("table, steps", RUNS)
def test_plain_gram_and_chosen_agree(table, steps):
    """On tall, wide, and stacks of matrices; the bounds are the promised ones.

    Rounding errors in R of 6e-8 are multiplied by the condition number of the product of the P, up
    to 2000 times a few.
    """
    for x, bound in (
        (gaussian((96, 384)), 1e-4),
        (gaussian((2, 96, 40)), 1e-4),
        (log_spaced((96, 384), 1e-3), 2e-3),
        (log_spaced((300, 96), 1e-3), 2e-3),
    ):
        found = results(x.astype(np.float32), table, steps)
        assert distance(found["gram"], found["newton_schulz"]) < bound
        assert distance(found["auto"], found["newton_schulz"]) < bound


@pytest.mark.parametrize("table, steps", RUNS)
def test_gram_stays_near_plain_where_singular_values_vanish(table, steps):
    """Low rank, one dominant direction, zero rows, spectra down to 1e-8: what momentum can be."""
    shape = (96, 384)
    low_rank = gaussian((96, 8)) @ gaussian((8, 384))
    dominant = gaussian(shape) + 1e4 * gaussian((96, 1)) @ gaussian((1, 384))
    zero_rows = gaussian(shape) * (np.arange(96) % 3 > 0)[:, None]
    cases = np.stack([low_rank, dominant, zero_rows, log_spaced(shape, 1e-8), np.zeros(shape)])
    found = results(cases.astype(np.float32), table, steps)
    exact = [reference_newton_schulz(x, table, steps) for x in cases.astype(np.float32)]
    for kind in ("newton_schulz", "gram"):
        assert np.isfinite(found[kind]).all()
        for result, x in zip(found[kind][:-1], exact[:-1], strict=True):
            # Rounding alone makes singular values of 6e-8, and the slope at 0 is up to 3,000.
            assert distance(result, x) < 5e-3
        assert not found[kind][-1].any()


@pytest.mark.parametrize("preconditioning", ["frobenius", "spectral", "schatten", "aol", "aol_out"])
def test_gram_with_every_preconditioning_and_orientation(preconditioning):
    for shape in ((24, 60), (60, 24), (24, 24)):
        found = results(
            gaussian(shape).astype(np.float32), "jordan", 5, preconditioning=preconditioning
        )
        assert distance(found["gram"], found["newton_schulz"]) < 1e-4


def test_gram_of_complex_float64_and_narrow_matrices():
    z = (gaussian((24, 60)) + 1j * gaussian((24, 60), 1)).astype(np.complex64)
    found = results(z, "cans", 8)
    assert distance(found["gram"], found["newton_schulz"]) < 1e-4
    narrow = results(gaussian((24, 60)).astype(jnp.bfloat16), "jordan", 5)
    assert narrow["gram"].dtype == jnp.bfloat16
    # Both are computed in float32 and differ in the last rounding at most: 2^-8 here and there.
    wide = {kind: y.astype(np.float32) for kind, y in narrow.items()}
    assert distance(wide["gram"], wide["newton_schulz"]) < 1e-3
    with jax.enable_x64(True):
        x = log_spaced((24, 60), 1e-3)
        found = results(x, "cans", 8)
        assert found["gram"].dtype == np.float64
        assert distance(found["gram"], found["newton_schulz"]) < 1e-10


def test_rows_of_any_degree():
    rows = coefficients.polar_express(5, degree=7)
    found = results(gaussian((24, 60)).astype(np.float32), rows, 5)
    assert distance(found["gram"], found["newton_schulz"]) < 1e-4


# --- restarts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", coefficients.TABLES)
def test_listed_restarts_are_the_rule(name):
    table = coefficients.TABLES[name]
    for steps, listed in enumerate(table.restarts, start=1):
        rows = (table.rows + table.rows[-1:] * steps)[:steps]
        assert listed == restarts.choose_restarts(rows), (name, steps)
    assert len(table.restarts) == (8 if table.repeats_last else len(table.rows))


@pytest.mark.parametrize(
    "table, steps, chosen, condition",
    [
        ("jordan", 5, (3,), 62.5),
        ("dion", 5, (2,), 53.2),
        ("you", 6, (2,), 179),
        ("polar_express", 5, (1,), 630),
        ("polar_express", 6, (1, 2), 145),
        ("polar_express", 8, (1, 3), 170),
    ],
)
def test_the_rule_is_the_published_one(table, steps, chosen, condition):
    """With float16's error it makes the published autotuner's choices (its own run, CPU)."""
    rows = coefficients.resolve(table, steps).rows
    float16 = functools.partial(restarts.condition, rows, error=4e-4)
    assert float16(chosen) == pytest.approx(condition, rel=0.01)
    others = [(i,) for i in range(1, steps)] if len(chosen) == 1 else [(1, 3), (1, 2), (2, 3)]
    assert min(others, key=float16) == chosen


def test_restarts_keep_the_condition_low_and_are_found_for_any_rows():
    for rows in (((3.4445, -4.775, 2.0315),) * 30, ((2.0, -1.5, 0.5),) * 12):
        chosen = restarts.choose_restarts(rows)
        assert restarts.condition(rows, chosen) < 2000
    # Without them it would not be: the guard is needed.
    assert restarts.condition(((3.4445, -4.775, 2.0315),) * 8, ()) > 1e5


# --- operations ---------------------------------------------------------------------------------


def counted_operations(jaxpr, times=1):
    """Multiplications and additions of all products, loops counted as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += times * 2 * inner * equation.outvars[0].aval.size
        turns = equation.params.get("length", 1)
        for value in equation.params.values():
            inner_jaxpr = getattr(value, "jaxpr", value)
            if hasattr(inner_jaxpr, "eqns"):
                total += counted_operations(inner_jaxpr, times * turns)
    return total


@pytest.mark.parametrize("shape", [(32, 32), (32, 80), (80, 32)])
@pytest.mark.parametrize("table, steps", [("jordan", 5), ("jordan", 6), ("cans", 8)])
def test_no_product_is_done_twice(shape, table, steps):
    """The traced program does exactly the products that the formulas count."""
    rows, _, _, chosen, _ = coefficients.resolve(table, steps)
    n, m = sorted(shape)
    segments = len(chosen) + 1
    formula = {
        "newton_schulz": steps * (4 * n * n * m + 2 * n**3),
        "gram": 4 * segments * n * n * m + 2 * n**3 * (4 * steps - 3 * segments),
    }
    for kind, cuts in (("newton_schulz", newton_schulz.every_step(rows)), ("gram", chosen)):
        function = polar.polar_function(kind, table, steps)
        traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((1, *shape), jnp.float32))
        assert counted_operations(traced.jaxpr) == formula[kind]
        assert newton_schulz.operations(shape, rows, cuts) == formula[kind]


def chooses_gram(shape, platform="cpu", dtype=jnp.float32, **options):
    """Whether a product of n x n matrices alone is repeated, which only the Gram form has."""
    function = jax.jit(polar.polar_function("auto", **options))
    lowered = function.trace(jax.ShapeDtypeStruct(shape, dtype)).lower(
        lowering_platforms=(platform,)
    )
    gram = jax.jit(polar.polar_function("gram")).trace(jax.ShapeDtypeStruct(shape, dtype))
    products = lowered.as_text().count("dot_general")
    return products == gram.lower(lowering_platforms=(platform,)).as_text().count("dot_general")


def test_auto_counts_operations_and_asks_for_float32_products():
    wide, square = (1, 32, 64), (1, 32, 32)
    assert chooses_gram(wide)
    assert chooses_gram((1, 64, 32))
    assert not chooses_gram(square)
    assert not chooses_gram((1, 32, 48))  # break-even
    assert not chooses_gram(wide, compute_dtype="bfloat16")
    # There float32 products are TF32 unless told otherwise.
    assert not chooses_gram(wide, "cuda")
    with jax.default_matmul_precision("highest"):
        assert chooses_gram(wide, "cuda")
    with jax.enable_x64(True):
        assert chooses_gram(wide, "cuda", jnp.float64)


@pytest.mark.parametrize("kind, table", [("gram", "jordan"), ("newton_schulz", "cans")])
def test_products_that_must_be_exact_are_so_on_every_platform(kind, table):
    function = jax.jit(polar.polar_function(kind, table))
    traced = function.trace(jax.ShapeDtypeStruct((1, 32, 64), jnp.float32))
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("dot_general") == text.count("precision = [HIGHEST, HIGHEST]")


def test_gram_errors_say_what_to_do():
    for arguments, name in ((("gram",), "polar='gram'"), (("auto", "cans"), "ns_coeffs='cans'")):
        with pytest.raises(ValueError, match=f"{name} diverges in products of less than float32"):
            polar.polar_function(*arguments, compute_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"traced, but polar='gram'.*static_args"):
        jax.jit(lambda x, n: polar.gram_newton_schulz(x, ns_steps=n))(jnp.ones((2, 4)), 5)
