"""Where the Gram iteration restarts: the listed choices follow the rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus import coefficients
from optax_muonplus.coefficients import _restarts as restarts
from tests.support import reference


@pytest.mark.parametrize("name", coefficients.TABLES)
def test_listed_restarts_follow_the_rule(name):
    table = coefficients.TABLES[name]
    for steps, listed in enumerate(table.restarts, start=1):
        rows = (table.rows + table.rows[-1:] * steps)[:steps]
        for products in restarts.ROUNDINGS:
            rule = restarts.fewest_restarts(rows, products)
            assert getattr(listed, products) == rule, (name, steps, products)
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
def test_the_rule_makes_the_published_choices(table, steps, chosen, condition):
    """With float16's error it makes the published autotuner's choices (its own run, CPU)."""
    rows = coefficients.for_steps(table, steps).rows
    float16 = functools.partial(restarts._condition, rows, error=4e-4)
    assert float16(chosen) == pytest.approx(condition, rel=0.01)
    others = [(i,) for i in range(1, steps)] if len(chosen) == 1 else [(1, 3), (1, 2), (2, 3)]
    assert min(others, key=float16) == chosen


# nanochat's and modded-nanogpt's five rows, as test_tables_and_generators.py has them.
OWN = coefficients.polar_express(5, safety=2e-2, cushion=0.02)


@pytest.mark.parametrize("shape", [(48, 192), (192, 48)])
@pytest.mark.parametrize("polar", ["gram", "auto"])
def test_rows_of_ones_own_run_in_the_gram_form(polar, shape):
    """As near to the polynomial in float64 as the plain form, from singular values down to 1e-3."""
    rng = np.random.default_rng(0)
    u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    x = (u * np.logspace(0, -3, 48)) @ v
    exact = reference.newton_schulz(x, OWN)
    prepared = coefficients.with_restarts(OWN)
    found = omp.orthogonalize(ns_coeffs=prepared, polar=polar)
    plain = omp.orthogonalize(ns_coeffs=OWN, polar="newton_schulz")
    tree = {"w": jnp.asarray(x, jnp.float32)}
    made, products = [], []
    for tx in (found, plain):
        update = jax.jit(tx.update)
        made.append(np.float64(update(tree, tx.init(tree))[0]["w"]))
        products.append(update.lower(tree, tx.init(tree)).as_text().count("dot_general"))
    assert np.abs(made[0] - exact).max() <= 1e-3 * np.abs(exact).max()
    assert products[0] != products[1]  # it is another form
    with pytest.raises(ValueError, match=r"with_restarts\(rows\) for rows of your own"):
        omp.orthogonalize(ns_coeffs=OWN, polar="gram")


def test_prepared_rows_know_their_restarts_and_how_many_they_are():
    prepared = coefficients.with_restarts(coefficients.polar_express(5))
    known = coefficients.for_steps(prepared, 5)
    assert known.restarts == coefficients.Restarts(
        *(restarts.fewest_restarts(known.rows, x) for x in restarts.ROUNDINGS), (1, 2, 3, 4)
    )
    with pytest.raises(ValueError, match="5 rows, too few for ns_steps=6"):
        omp.muonplus(0.1, prepared, 6)
    assert hash(omp.polar.Orthogonalize(prepared).ns_coeffs)
