"""What is decided about the parts of a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus._chain.program import functions_of
from optax_muonplus._core.normalize import Normalize
from optax_muonplus._core.orthogonalize import Orthogonalize
from optax_muonplus._execution.lower import NormalizeBounded, lower
from tests.support import reference
from tests.support.oracle_runs import NORMS


def normalization(norm, norm_eps=0.0, match_frobenius=True, polar="auto"):
    """What runs of a normalization that follows a polar factor."""
    parts = [Orthogonalize(polar=polar), Normalize(norm, norm_eps, match_frobenius)]
    return lower(functions_of(parts), "cpu").functions[1]


def matrices_with_dead_units():
    x = np.random.default_rng(0).normal(size=(2, 6, 10))
    x[:, 2], x[:, :, 3] = 0, 0
    return x


@pytest.mark.parametrize("norm_eps", [0.0, 1e-8, 0.5])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "none"])
def test_norms_of_sides_are_enough_to_match_the_frobenius_norm(norm, norm_eps):
    x = matrices_with_dead_units()
    divided = [reference.norm_dir(matrix, norm, max(norm_eps, 1e-200)) for matrix in x]
    sizes = [np.linalg.norm(x[i]) / np.linalg.norm(divided[i]) for i in range(len(x))]
    expected = [y * size for y, size in zip(divided, sizes, strict=True)]
    function = normalization(norm, norm_eps)
    found = function(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    other = function.transposed()(jnp.swapaxes(jnp.asarray(x, jnp.float32), 1, 2))
    np.testing.assert_allclose(jnp.swapaxes(other, 1, 2), found, rtol=1e-6)


def test_matching_the_frobenius_norm_takes_no_further_pass():
    """After a polar factor; after a function of one's own squares may leave float32's range."""
    x = jnp.ones((6, 10))

    def passes(**options):
        equations = jax.make_jaxpr(normalization("row_col", **options))(x).eqns
        reductions = [e for e in equations if e.primitive.name.startswith("reduce_")]
        return sum(e.invars[0].aval.shape == x.shape and "axes" in e.params for e in reductions)

    assert passes() == passes(match_frobenius=False) == 2
    assert passes(polar=jnp.sign) > 2


def test_parts_stay_what_a_user_made():
    polar_factor, norm = Orthogonalize(eps=1e-3), Normalize("row")
    assert functions_of([polar_factor, norm]) == (polar_factor, norm)
    assert isinstance(lower([polar_factor, norm], "cpu").functions[1], NormalizeBounded)
    assert vars(norm) == vars(Normalize("row"))


def update(tx, x):
    return tx.update({"kernel": x}, tx.init({"kernel": x}))[0]["kernel"]


@pytest.mark.parametrize(
    "links",
    [
        [omp.normalize()],
        [omp.normalize("none")],
        [omp.normalize("long", match_frobenius=False)],
        [jnp.sign, omp.normalize("row")],
        [omp.normalize("row", match_frobenius=False)],
        [omp.orthogonalize(polar=lambda x: 3 * jnp.sign(x))],
        [omp.orthogonalize(polar=lambda x: 3 * jnp.sign(x)), omp.normalize()],
    ],
)
def test_consistent_rms_holds_for_a_normalization_without_a_polar_factor(links):
    """Their sides do not say how large these matrices are, but for the last one."""
    tx = omp.matrix_chain(omp.momentum(), *links, omp.scale_by_shape(consistent_rms=0.2))
    for shape in ((6, 9), (7, 7)):
        found = update(tx, jax.random.normal(jax.random.key(0), shape))
        np.testing.assert_allclose(jnp.sqrt(jnp.mean(found**2)), 0.2, rtol=1e-5)


def test_a_function_after_an_adaptive_rule_sees_its_updates():
    x = jax.random.normal(jax.random.key(0), (6, 9))
    rule = omp.scale_by_muonplus(adaptive=True)
    one, two = omp.matrix_chain(rule, jnp.sign), optax.chain(rule, omp.matrix_chain(jnp.sign))
    np.testing.assert_array_equal(update(one, x), update(two, x))


def test_no_number_of_one_trace_is_kept_for_the_next():
    """Half of eps is an array of the trace that divides it."""
    params = {"kernel": jnp.ones((4, 6))}
    tx = omp.scale_by_muonplus(eps=jnp.float32(1e-8), bias_correction=True)
    state = tx.init(params)
    first, _ = jax.jit(tx.update)(params, state)
    again, _ = tx.update(params, state)
    np.testing.assert_allclose(first["kernel"], again["kernel"], rtol=1e-5)
