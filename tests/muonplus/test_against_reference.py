"""The optimizer against the float64 NumPy oracle, option by option."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from tests.support import reference
from tests.support.oracle_runs import (
    DIMS,
    NORMS,
    SHAPES,
    STEPS,
    TOLERANCE,
    assert_close,
    check,
    oracle_of,
    ours_and_theirs,
    random_trees,
    updates_of,
)
from tests.support.platforms import LESS_EXACT

ORTHOGONALIZERS = {
    "jordan": {"ns_coeffs": "jordan"},
    "you": {"ns_coeffs": "you"},
    "you-6": {"ns_coeffs": "you", "ns_steps": 6},
    "dion": {"ns_coeffs": "dion"},
    "polar_express": {"ns_coeffs": "polar_express"},
    "cubic": {"ns_coeffs": "cubic"},
    "cubic-7": {"ns_coeffs": "cubic", "ns_steps": 7},
    "triple": {"ns_coeffs": (2.0, -1.5, 0.5), "ns_steps": 12},
    "rows": {"ns_coeffs": ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5)), "ns_steps": 2},
    "svd": {"polar": "svd"},
}
# The norm gets a polar factor, whichever table it is of.
WITH_EVERY_NORM = ("jordan", "svd")


@pytest.mark.parametrize("name", ORTHOGONALIZERS)
def test_every_table_with_every_norm_with_and_without_nesterov(name):
    """Three steps on tall, wide and square matrices; every norm with two of the tables.

    Not under jit, where each of the variants would be compiled as a whole: the iteration has a jit
    of its own, which they share.
    """
    params, grads = random_trees()
    norms = NORMS if name in WITH_EVERY_NORM else ("none", "col_row")
    for norm, nesterov in itertools.product(norms, (False, True)):
        ours, theirs = ours_and_theirs(**ORTHOGONALIZERS[name], norm=norm, nesterov=nesterov)
        tx = omp.muonplus(1.0, muon_weight_dimension_numbers=DIMS, **ours)
        state, steps = tx.init(params), []
        for t in range(STEPS):
            updates, state = tx.update({k: g[t] for k, g in grads.items()}, state, params)
            steps.append(updates)
        actual = {k: np.stack([step[k] for step in steps]) for k in SHAPES}
        expected = oracle_of(params, grads, **theirs)
        assert_close(actual, expected, TOLERANCE, context=f"{name} {ours}")


def test_defaults_are_the_algorithm_with_optaxs_length():
    """Nesterov momentum 0.95, five Jordan steps, row_col, sqrt(max(1, m/n)), matched norm."""
    params, grads = random_trees(1)
    (actual,) = updates_of([omp.muonplus(0.5)], params, grads)
    assert_close(actual, oracle_of(params, grads, learning_rate=0.5))
    (actual,) = updates_of([omp.muonplus(0.5, nesterov=False)], params, grads)
    assert_close(actual, oracle_of(params, grads, learning_rate=0.5, nesterov=False))
    (actual,) = updates_of([omp.muon(0.5)], params, grads)
    assert_close(actual, oracle_of(params, grads, learning_rate=0.5, norm="none"))


def test_bias_correction():
    """Which a polar factor sees under Nesterov, and every update with `adaptive`."""
    options = {"polar": "svd", "beta": 0.6, "bias_correction": True, "adaptive": True}
    check([ours_and_theirs(**options, nesterov=n) for n in (False, True)], *random_trees(2))


@pytest.mark.parametrize("word", ["frobenius", "spectral", "schatten", "aol"])
def test_every_preconditioning(word):
    """Alone on complex matrices; with safety_factor and an `eps` that is felt on real ones."""
    dion = ours_and_theirs(preconditioning=word, ns_coeffs="dion", ns_steps=4)
    express = ours_and_theirs(
        preconditioning=word, ns_coeffs="polar_express", ns_steps=4, eps=0.7, norm="none"
    )
    cubic = ours_and_theirs(preconditioning=word, ns_coeffs="cubic")
    tolerance = TOLERANCE * (LESS_EXACT if word == "spectral" else 1)  # it is from an SVD
    check([dion, cubic], *random_trees(4, np.complex64), tolerance=tolerance)
    check([express, cubic], *random_trees(4), tolerance=tolerance)


def test_complex_svd_and_adaptive():
    variants = [
        ours_and_theirs(polar="svd", norm="row_col"),
        ours_and_theirs(adaptive=True, norm="row", match_frobenius=True),
    ]
    check(variants, *random_trees(5, np.complex64))


def test_every_shape_scale():
    """The polar factor plays no part here, and the exact one compiles fastest."""
    check(
        [ours_and_theirs(polar="svd", shape_scale=word) for word in ("spectral", "max", "none")],
        *random_trees(6),
    )


def test_match_frobenius_adaptive_and_norm_eps():
    variants = [
        ours_and_theirs(match_frobenius=match, adaptive=adaptive, norm=norm, norm_eps=0.3)
        for match, adaptive, norm in [
            (False, False, "col"),
            (True, False, "row_col"),
            (False, True, "row"),
            (True, True, "col"),
        ]
    ]
    check(variants, *random_trees(7))


def test_consistent_rms_is_the_measured_one():
    """Of exact polar factors, and of approximate ones that are normalized."""
    params, grads = random_trees(9)
    given = [(norm, match) for norm in NORMS for match in (False, True)]
    options = [
        {"consistent_rms": 0.2, "norm": norm, "match_frobenius": match, **exact}
        for norm, match in given
        for exact in ({"polar": "svd"}, {})
    ]
    transformations = [omp.scale_by_muonplus(**option) for option in options]
    for option, actual in zip(options, updates_of(transformations, params, grads), strict=True):
        assert_close(
            actual, oracle_of(params, grads, learning_rate=-1, **ours_and_theirs(**option)[1])
        )
        for key, update in actual.items():
            if "polar" not in option and option["norm"] in ("none", "long"):
                continue
            rms = np.sqrt(np.mean(np.square(update), axis=(1, 2)))
            # 1e-5: norm_eps = 1e-8 under the root takes off 5e-9, the rest is rounding.
            np.testing.assert_allclose(rms, 0.2, rtol=1e-5, err_msg=f"{option} {key}")


@pytest.mark.parametrize("options", [{}, {"adam_nesterov": True}, {"adam_nesterov": False}])
def test_whole_optimizer_with_weight_decay_and_adamw(options):
    """Decay is decoupled and times the learning rate; vectors and masked leaves get AdamW, which
    looks one step ahead by default, as in Optax's Muon."""
    params, grads = random_trees(11)
    rng = np.random.default_rng(12)
    bias = rng.normal(size=5).astype(np.float32)
    bias_grads = rng.normal(size=(STEPS, 5)).astype(np.float32)
    tx = omp.muonplus(
        0.3, weight_decay=0.1, adam_b1=0.8, adam_b2=0.7, adam_eps_root=1e-3,
        adam_weight_decay=0.2, adam_learning_rate=0.05, **options,
    )  # fmt: skip
    (updates,) = updates_of([tx], {**params, "bias": bias}, {**grads, "bias": bias_grads})
    assert_close(updates, oracle_of(params, grads, learning_rate=0.3, weight_decay=0.1))
    m = v = 0.0
    for t in range(STEPS):
        expected, m, v = reference.adamw_step(
            bias.astype(np.float64), m, v, bias_grads[t].astype(np.float64), t + 1,
            learning_rate=0.05, b1=0.8, b2=0.7, eps=1e-8, eps_root=1e-3, weight_decay=0.2,
            nesterov=options.get("adam_nesterov", True),
        )  # fmt: skip
        np.testing.assert_allclose(updates["bias"][t], expected, rtol=1e-5)


def test_float64_agrees_to_float64_rounding():
    """Nothing on the way is rounded to float32."""
    with jax.enable_x64(True):
        variants = [
            ours_and_theirs(polar="svd", norm="row_col", weight_decay=0.1),
            ours_and_theirs(ns_coeffs="polar_express", ns_steps=10, norm="none"),
            ours_and_theirs(preconditioning="aol", consistent_rms=0.2, adaptive=True),
        ]
        check(variants, *random_trees(13, np.float64), tolerance=1e-12)


def test_compute_dtype_changes_the_products_only():
    """bfloat16 products: visibly rounded, close to the oracle, unit rows to float32 rounding."""
    params, grads = random_trees(14)
    free = {"norm": "col_row", "match_frobenius": False, "shape_scale": "none"}
    link = omp.scale_by_muonplus(compute_dtype=jnp.bfloat16, **free)
    (updates,) = updates_of([link], params, grads)
    expected = oracle_of(params, grads, **free)
    for key in SHAPES:
        update = np.asarray(updates[key])
        error = np.linalg.norm(update + expected[key]) / np.linalg.norm(expected[key])
        # bfloat16 keeps 8 bits, 4e-3 of a product; 0.02 was measured on the square matrix, whose
        # small singular values amplify it.
        assert 1e-4 < error < 0.06, f"{key}: {error}"
        assert update.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(update, axis=1), 1, rtol=1e-6)


def test_the_papers_form_is_its_published_code():
    """omp.PAPER against the oracle with the paper's arguments, in both groups of parameters."""
    params, grads = random_trees(21)
    tx = omp.muonplus(0.5, **omp.PAPER, muon_weight_dimension_numbers=DIMS)
    (actual,) = updates_of([tx], params, grads)
    paper = {"norm": "col_row", "match_frobenius": False, "shape_scale": "spectral"}
    expected = oracle_of(params, grads, learning_rate=0.5, weight_decay=0.1, **paper)
    assert_close(actual, expected)
    bias = {"bias": np.linspace(-1, 1, 5, dtype=np.float32)}
    tx = omp.muonplus(0.5, **omp.PAPER)
    state, m, v = tx.init(bias), np.zeros(5), np.zeros(5)
    for t in range(1, STEPS + 1):
        gradient = np.linspace(-2, t, 5, dtype=np.float32)
        updates, state = tx.update({"bias": gradient}, state, bias)
        wanted, m, v = reference.adamw_step(
            bias["bias"], m, v, gradient, t,
            learning_rate=0.5, b1=0.95, b2=0.95, weight_decay=0.1, nesterov=False,
        )  # fmt: skip
        np.testing.assert_allclose(updates["bias"], wanted, rtol=2e-5)
