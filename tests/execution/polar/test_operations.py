"""Counted products: the formulas, and what polar='auto' chooses by them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muonplus import coefficients, polar
from optax_muonplus._execution.polar import iteration as running


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
@pytest.mark.parametrize(
    "table, steps", [("jordan", 5), ("jordan", 6), ("polar_express", 8), ("cubic", 5)]
)
def test_traced_programs_do_the_products_of_the_formula(shape, table, steps):
    """The traced program does exactly the products that the formulas count."""
    resolved = coefficients.for_steps(table, steps)
    n, m = sorted(shape)
    plain = tuple(range(1, steps))
    for restarts in {plain, *coefficients.TABLES[table].restarts(steps)}:
        segments = len(restarts) + 1
        squares = steps * (len(resolved.rows[0]) - 2)  # a cubic has none
        formula = 4 * segments * n * n * m + 2 * n**3 * (squares + 3 * (steps - segments))
        chosen = polar.FastPolar(polar.Orthogonalize(table, steps)).iteration(
            "cpu", shape, "float32"
        )
        iteration = dataclasses.replace(chosen, restarts=restarts)
        function = functools.partial(running.iterate, iteration=iteration)
        traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((1, *shape), jnp.float32), 0.0)
        assert counted_operations(traced.jaxpr) == formula
        assert running.operations(shape, resolved.rows, restarts) == formula
    defined = polar.Orthogonalize(table, steps).flops(shape)
    assert defined == running.operations(shape, resolved.rows, plain)


def chooses_gram(shape, platform="cpu", dtype=jnp.float32, **options):
    """Whether a product of n x n matrices alone is repeated, which only the Gram form has."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    products, gram = (
        str(jax.make_jaxpr(polar.FastPolar(function, platform))(x)).count("dot_general")
        for function in (polar.Orthogonalize(**options), polar.Orthogonalize(polar="gram"))
    )
    assert products > 0
    return products == gram


@pytest.mark.cpu_program
def test_auto_counts_operations_and_asks_for_float32_products():
    wide, square = (1, 32, 64), (1, 32, 32)
    assert chooses_gram(wide)
    assert chooses_gram((1, 64, 32))
    assert not chooses_gram(square)
    assert not chooses_gram((1, 32, 48))  # break-even
    assert not chooses_gram(wide, ns_coeffs="polar_express", compute_dtype="bfloat16")
    assert not chooses_gram(square, "gpu", compute_dtype="bfloat16")
    # There float32 products are TF32 unless told otherwise.
    assert not chooses_gram(wide, "gpu")
    with jax.default_matmul_precision("highest"):
        assert chooses_gram(wide, "gpu")
    with jax.enable_x64(True):
        assert chooses_gram(wide, "gpu", jnp.float64)


def test_the_gram_form_makes_exact_products_on_accelerators():
    """TF32 is not enough for it; the plain iteration leaves the precision to JAX."""
    x = jax.ShapeDtypeStruct((1, 32, 64), jnp.float32)
    for platform in ("gpu", "tpu"):
        with jax.default_matmul_precision("default"):
            gram, plain = (
                str(jax.make_jaxpr(polar.FastPolar(polar.Orthogonalize(polar=kind), platform))(x))
                for kind in ("gram", "newton_schulz")
            )
        assert gram.count("dot_general") == gram.count("precision=(Precision.HIGHEST") > 0
        assert "HIGHEST" not in plain
