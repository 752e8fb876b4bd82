"""Several steps of the optimizer and of the float64 oracle on the same gradients."""

import typing

import jax
import numpy as np
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from tests.support import reference

# Not auto: on a square polar factor, rounding decides which side varies more.
NORMS = typing.get_args(omp.matrices.Norm)
# Kernels as Flax stores them, (in, out): W is their transpose.
SHAPES = {"tall": (12, 20), "wide": (20, 12), "square": (16, 16)}
DIMS = MuonDimensionNumbers(reduction_axis=0, output_axis=1)
STEPS = 3
# A share of the largest entry of an update. float32 rounds each of about 40 sums of 20 products by
# 6e-8, and the polynomials amplify it up to a hundredfold; the worst measured is 6e-6, a fifth.
TOLERANCE = 3e-5


def random_trees(seed=0, dtype=np.float32):
    """Parameters, and gradients with one leading axis for the steps."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        x = rng.normal(size=shape)
        return x + 1j * rng.normal(size=shape) if np.issubdtype(dtype, np.complexfloating) else x

    params = {k: draw(s).astype(dtype) for k, s in SHAPES.items()}
    grads = {k: draw((STEPS, *s)).astype(dtype) for k, s in SHAPES.items()}
    return params, grads


def updates_of(transformations, params, grads):
    """Updates of every transformation at every step, the parameters held still, in one program."""

    def run(tx):
        def step(state, g):
            updates, state = tx.update(g, state, params)
            return state, updates

        return jax.lax.scan(step, tx.init(params), grads)[1]

    return jax.jit(lambda: [run(tx) for tx in transformations])()


def oracle_of(params, grads, **options):
    """The oracle's update of each step."""
    steps = []
    mu = {k: np.zeros(s[::-1]) for k, s in SHAPES.items()}
    for t in range(STEPS):
        updates = {}
        for k in SHAPES:
            w, g = (np.asarray(x, _wide(x)).T for x in (params[k], grads[k][t]))
            update, mu[k] = reference.muonplus_step(w, mu[k], g, t + 1, **options)
            updates[k] = update.T
        steps.append(updates)
    return {k: np.stack([s[k] for s in steps]) for k in SHAPES}


def _wide(x):
    return np.complex128 if np.iscomplexobj(x) else np.float64


def assert_close(actual, expected, tolerance=TOLERANCE, context=""):
    """Every leaf within ``tolerance`` of its largest entry."""
    for key, want in expected.items():
        error = np.abs(np.asarray(actual[key]) - want).max() / np.abs(want).max()
        assert error <= tolerance, f"{context} {key}: {error:.2e}"


def check(variants, params, grads, tolerance=TOLERANCE):
    """``variants``: pairs of options of the package and of the oracle."""
    transformations = [
        omp.muonplus(1.0, muon_weight_dimension_numbers=DIMS, **ours) for ours, _ in variants
    ]
    for (ours, theirs), actual in zip(
        variants, updates_of(transformations, params, grads), strict=True
    ):
        assert_close(actual, oracle_of(params, grads, **theirs), tolerance, context=str(ours))


def ours_and_theirs(**options):
    """Options of the package under the oracle's names."""
    names = {"ns_coeffs": "table", "ns_steps": "steps"}
    theirs = {names.get(k, k): v for k, v in options.items() if k != "polar"}
    if options.get("polar") == "svd":
        theirs["table"] = "svd"
    return options, theirs
