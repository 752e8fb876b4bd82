"""Gram Newton-Schulz: the same polynomial as the plain iteration, with fewer operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_muonplus.polar import FastPolar, Orthogonalize
from tests.support.reference import newton_schulz as reference_newton_schulz

# Every table with every number of steps from its usual one to the longest listed.
RUNS = [
    *(("jordan", steps) for steps in (5, 6, 8)),
    *(("you", steps) for steps in (5, 6)),
    ("dion", 5),
    *(("polar_express", steps) for steps in (5, 6, 8)),
    *(("cubic", steps) for steps in (5, 8)),
]
METHODS = ("newton_schulz", "gram")
# The same code with the factors in another order.
TALL = (
    ("jordan", 5),
    ("polar_express", 8),
    ("cubic", 8),
)


def gaussian(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def log_spaced(shape, smallest):
    """Singular values log-spaced from 1 to ``smallest``."""
    u, _, vh = np.linalg.svd(gaussian(shape), full_matrices=False)
    return u * np.logspace(0, np.log10(smallest), min(shape)) @ vh


def results(x, table, steps, kinds=METHODS, **options):
    """Of each kind, in one program."""
    x = jnp.asarray(x)

    def each(x):
        return {
            kind: FastPolar(Orthogonalize(table, steps, polar=kind, **options))(x) for kind in kinds
        }

    return {kind: np.asarray(y) for kind, y in jax.jit(each)(x).items()}


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@functools.cache
def hard():
    """What momentum can be, and zeros; the first two have spectra down to a thousandth."""
    shape = (96, 384)
    low_rank = gaussian((96, 8)) @ gaussian((8, 384))
    dominant = gaussian(shape) + 1e4 * gaussian((96, 1)) @ gaussian((1, 384))
    zero_rows = gaussian(shape) * (np.arange(96) % 3 > 0)[:, None]
    down_to = [log_spaced(shape, smallest) for smallest in (1e-3, 1e-8)]
    cases = [gaussian(shape), down_to[0], low_rank, dominant, zero_rows, down_to[1]]
    return np.stack([*cases, np.zeros(shape)]).astype(np.float32)


@functools.cache  # two tests read them
def of_hard(table, steps):
    return results(hard(), table, steps)


@pytest.mark.parametrize("table, steps", RUNS)
def test_newton_schulz_and_gram_agree(table, steps):
    """On tall and wide matrices; the bounds are the promised ones.

    Rounding errors in R of 6e-8 are multiplied by the condition number of the product of the P, up
    to 2000 times a few.
    """
    given = [of_hard(table, steps)]
    if (table, steps) in TALL:
        tall = np.stack([gaussian((300, 96)), log_spaced((300, 96), 1e-3)]).astype(np.float32)
        given.append(results(tall, table, steps))
    for found in given:
        for i, bound in enumerate((1e-4, 2e-3)):
            assert distance(found["gram"][i], found["newton_schulz"][i]) < bound


@pytest.mark.parametrize("table, steps", RUNS)
def test_gram_is_accurate_for_vanishing_singular_values(table, steps):
    """Low rank, one dominant direction, zero rows, spectra down to 1e-8: what momentum can be."""
    found = of_hard(table, steps)
    exact = [reference_newton_schulz(x, table, steps) for x in hard()[2:-1]]
    for kind in ("newton_schulz", "gram"):
        assert np.isfinite(found[kind]).all()
        for result, x in zip(found[kind][2:-1], exact, strict=True):
            # Rounding alone makes singular values of 6e-8, and the slope at 0 is up to 3,000.
            assert distance(result, x) < 5e-3
        assert not found[kind][-1].any()


def test_gram_of_complex_and_float64_matrices():
    z = (gaussian((24, 60)) + 1j * gaussian((24, 60), 1)).astype(np.complex64)
    found = results(z, "polar_express", 8)
    assert distance(found["gram"], found["newton_schulz"]) < 1e-4
    with jax.enable_x64(True):
        x = log_spaced((24, 60), 1e-3)
        found = results(x, "polar_express", 8)
        assert found["gram"].dtype == np.float64
        assert distance(found["gram"], found["newton_schulz"]) < 1e-10


def test_gram_is_refused_where_no_restarts_are_listed():
    """Rows of one's own, a last row repeated further than the list goes, and traced steps."""
    x = gaussian((24, 60)).astype(np.float32)
    for rows, steps in (([(35 / 16, -35 / 16, 21 / 16, -5 / 16)] * 5, 5), ("jordan", 9)):
        found = results(x, rows, steps, ("newton_schulz", "auto"))
        np.testing.assert_array_equal(found["auto"], found["newton_schulz"])
        with pytest.raises(ValueError, match=f'"gram" needs restarts.*known for {steps} steps'):
            Orthogonalize(rows, steps, polar="gram")
    with pytest.raises(ValueError, match="ns_steps as a Python int"):
        jax.eval_shape(lambda n: Orthogonalize(ns_steps=n, polar="gram")(x), 5)
