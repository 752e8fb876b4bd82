"""The optimizer against the float64 NumPy oracle of `reference.py`, option by option."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from tests.support import reference

NORMS = ("none", "col", "row", "col_row", "row_col")
# Kernels as Flax stores them, (in, out): W is their transpose.
SHAPES = {"tall": (12, 20), "wide": (20, 12), "square": (16, 16)}
DIMS = MuonDimensionNumbers(reduction_axis=0, output_axis=1)
STEPS = 3

# Of the largest entry of an update. float32 keeps 6e-8 of each of about 40 sums of 20 products, and
# the polynomials amplify it up to a hundredfold; the worst measured is 6e-6, a fifth of this.
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
    """The same from the oracle."""
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


ORTHOGONALIZERS = {
    "jordan": {"ns_coeffs": "jordan"},
    "you": {"ns_coeffs": "you"},
    "you-6": {"ns_coeffs": "you", "ns_steps": 6},
    "dion": {"ns_coeffs": "dion"},
    "turbo": {"ns_coeffs": "turbo", "ns_steps": 4},
    "polar_express": {"ns_coeffs": "polar_express"},
    "cans": {"ns_coeffs": "cans"},
    "cans-7": {"ns_coeffs": "cans", "ns_steps": 7},
    "triple": {"ns_coeffs": (2.0, -1.5, 0.5), "ns_steps": 12},
    "rows": {"ns_coeffs": ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5), (1.0, 1.0, 1.0)), "ns_steps": 2},
    "svd": {"polar": "svd"},
}


# CANS has no cushion: its first polynomial takes terms of order 8 down to 0.002, so the rounding of
# those terms is 1000 times as large beside what is left. A plain float32 NumPy loop errs by 1.8e-4.
# Further steps contract that again.
LOOSER = {"cans": 1e-3}


@pytest.mark.parametrize("name", ORTHOGONALIZERS)
def test_every_table_with_every_norm_with_and_without_nesterov(name):
    """Three steps on tall, wide and square matrices.

    Not under jit, where each of the ten variants would be compiled as a whole: the iteration has a
    jit of its own, which they share.
    """
    params, grads = random_trees()
    for norm, nesterov in itertools.product(NORMS, (False, True)):
        ours, theirs = ours_and_theirs(**ORTHOGONALIZERS[name], norm=norm, nesterov=nesterov)
        tx = omp.muonplus(1.0, muon_weight_dimension_numbers=DIMS, **ours)
        state, steps = tx.init(params), []
        for t in range(STEPS):
            updates, state = tx.update({k: g[t] for k, g in grads.items()}, state, params)
            steps.append(updates)
        actual = {k: np.stack([step[k] for step in steps]) for k in SHAPES}
        expected = oracle_of(params, grads, **theirs)
        assert_close(actual, expected, LOOSER.get(name, TOLERANCE), context=f"{name} {ours}")


def test_defaults_are_the_papers_algorithm():
    """Without any option: EMA momentum 0.95, five Jordan steps, col_row, sqrt(m/n)."""
    params, grads = random_trees(1)
    (actual,) = updates_of([omp.muonplus(0.5)], params, grads)
    assert_close(actual, oracle_of(params, grads, learning_rate=0.5))
    (actual,) = updates_of([omp.muon(0.5)], params, grads)
    assert_close(actual, oracle_of(params, grads, learning_rate=0.5, norm="none"))


def test_bias_correction():
    """Which a polar factor sees under Nesterov, and every update with `adaptive`."""
    options = {"polar": "svd", "beta": 0.6, "bias_correction": True, "adaptive": True}
    check([ours_and_theirs(**options, nesterov=n) for n in (False, True)], *random_trees(2))


def test_momentum_link_hands_on_what_the_oracle_does():
    params, grads = random_trees(3)
    options = [
        {"beta": 0.8, "nesterov": nesterov, "bias_correction": correction}
        for nesterov, correction in itertools.product((False, True), repeat=2)
    ]
    for option, actual in zip(
        options, updates_of([omp.momentum(**o) for o in options], params, grads), strict=True
    ):
        mu, expected = 0.0, []
        for t, g in enumerate(grads["tall"].astype(np.float64)):
            direction, mu = reference.momentum(mu, g, t + 1, **option)
            expected.append(direction)
        np.testing.assert_allclose(actual["tall"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("word", ["frobenius", "spectral", "schatten", "aol", "aol_out"])
def test_preconditionings(word):
    """Alone on complex matrices; with headroom and an `eps` that is felt on real ones."""
    turbo = ours_and_theirs(preconditioning=word, ns_coeffs="turbo", ns_steps=4)
    express = ours_and_theirs(
        preconditioning=word, ns_coeffs="polar_express", ns_steps=4, eps=0.7, norm="none"
    )
    check([turbo], *random_trees(4, np.complex64))
    check([express], *random_trees(4))


def test_complex_svd_and_adaptive():
    variants = [
        ours_and_theirs(polar="svd", norm="row_col"),
        ours_and_theirs(adaptive=True, norm="row", match_frobenius=True),
    ]
    check(variants, *random_trees(5, np.complex64))


def test_shape_scales():
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


def test_matched_update_has_the_frobenius_norm_of_the_polar_factor():
    """... and still the direction of the normalized one."""
    params, grads = random_trees(8)
    options = [{"norm": "none"}, {"norm": "col_row"}, {"norm": "col_row", "match_frobenius": True}]
    plain, normalized, matched = updates_of(
        [omp.scale_by_muonplus(shape_scale="none", **o) for o in options], params, grads
    )
    for key in SHAPES:
        size = [np.linalg.norm(x[key], axis=(1, 2)) for x in (plain, normalized, matched)]
        np.testing.assert_allclose(size[2], size[0], rtol=1e-6)
        assert np.all(np.abs(size[1] / size[0] - 1) > 0.02)  # there was something to match
        ratio = (size[0] / size[1])[:, None, None]
        np.testing.assert_allclose(matched[key], normalized[key] * ratio, rtol=1e-5, atol=1e-7)


def test_consistent_rms_is_the_measured_one():
    """With an exact polar factor the root mean square of every update is the number asked for."""
    params, grads = random_trees(9)
    options = [
        {"polar": "svd", "consistent_rms": 0.2, "norm": norm, "match_frobenius": match}
        for norm, match in [*((norm, False) for norm in NORMS), ("row", True), ("row_col", True)]
    ]
    transformations = [omp.scale_by_muonplus(**option) for option in options]
    for option, actual in zip(options, updates_of(transformations, params, grads), strict=True):
        assert_close(
            actual, oracle_of(params, grads, learning_rate=-1, **ours_and_theirs(**option)[1])
        )
        for key, update in actual.items():
            rms = np.sqrt(np.mean(np.square(update), axis=(1, 2)))
            # 1e-5: norm_eps = 1e-8 under the root takes off 5e-9, the rest is rounding.
            np.testing.assert_allclose(rms, 0.2, rtol=1e-5, err_msg=f"{option} {key}")


def test_links_chained_by_hand_are_the_alias():
    params, grads = random_trees(10)
    common = {"norm": "row_col", "match_frobenius": True}
    polar = {"ns_coeffs": "polar_express", "ns_steps": 4, "eps": 0.1, "preconditioning": "aol"}
    momentum = {"beta": 0.7, "nesterov": True, "bias_correction": True}
    tail = [optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.3)]
    links = [
        omp.momentum(**momentum),
        omp.orthogonalize(**polar, weight_dimension_numbers=DIMS),
        omp.normalize(norm_eps=1e-3, **common, weight_dimension_numbers=DIMS),
        omp.scale_by_shape("max", 0.2, **common, weight_dimension_numbers=DIMS),
    ]
    matrix_part = {
        **momentum, **polar, **common,
        "norm_eps": 1e-3, "shape_scale": "max", "consistent_rms": 0.2,
    }  # fmt: skip
    by_hand, part, alias = updates_of(
        [
            optax.chain(*links, *tail),
            optax.chain(omp.scale_by_muonplus(**matrix_part, weight_dimension_numbers=DIMS), *tail),
            omp.muonplus(0.3, weight_decay=0.1, **matrix_part, muon_weight_dimension_numbers=DIMS),
        ],
        params,
        grads,
    )
    for key in SHAPES:
        np.testing.assert_allclose(part[key], by_hand[key], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(alias[key], by_hand[key], rtol=1e-5, atol=1e-7)


def test_whole_optimizer_with_weight_decay_and_adamw():
    """Decay is decoupled and times the learning rate; vectors and masked leaves get AdamW."""
    params, grads = random_trees(11)
    rng = np.random.default_rng(12)
    bias = rng.normal(size=5).astype(np.float32)
    bias_grads = rng.normal(size=(STEPS, 5)).astype(np.float32)
    tx = omp.muonplus(
        0.3, weight_decay=0.1, adam_b1=0.8, adam_b2=0.7, adam_eps=1e-2, adam_eps_root=1e-3,
        adam_weight_decay=0.2, adam_learning_rate=0.05,
    )  # fmt: skip
    (updates,) = updates_of([tx], {**params, "bias": bias}, {**grads, "bias": bias_grads})
    assert_close(updates, oracle_of(params, grads, learning_rate=0.3, weight_decay=0.1))
    m = v = 0.0
    for t in range(STEPS):
        expected, m, v = reference.adamw_step(
            bias.astype(np.float64), m, v, bias_grads[t].astype(np.float64), t + 1,
            learning_rate=0.05, b1=0.8, b2=0.7, eps=1e-2, eps_root=1e-3, weight_decay=0.2,
        )  # fmt: skip
        np.testing.assert_allclose(updates["bias"][t], expected, rtol=1e-5)


def test_a_polar_function_of_ones_own_sees_out_times_in():
    """Whatever the storage; here one that scales each output unit by its index."""
    params, grads = random_trees(15)

    def count_rows(x):
        return x * jnp.arange(1, x.shape[-2] + 1)[None, :, None]

    tx = omp.scale_by_muonplus(polar=count_rows, norm="col", beta=0.5, shape_scale="none")
    (updates,) = updates_of([tx], params, grads)
    for key in SHAPES:
        w = 0.5 * grads[key][0].T.astype(np.float64)
        expected = reference.norm_dir(w * np.arange(1, len(w) + 1)[:, None], "col")
        np.testing.assert_allclose(updates[key][0].T, expected, rtol=1e-5, atol=1e-6)


def test_polar_functions_act_on_stacks_of_any_rank():
    x = np.random.default_rng(16).normal(size=(2, 3, 5, 7)).astype(np.float32)
    newton_schulz, svd = omp.polar.newton_schulz(x, "you", 4), omp.polar.svd(x)
    for i in np.ndindex(2, 3):
        one = x[i].astype(np.float64)
        expected = reference.newton_schulz(one, "you", 4)
        np.testing.assert_allclose(newton_schulz[i], expected, atol=TOLERANCE)
        np.testing.assert_allclose(svd[i], reference.svd_polar(one), atol=TOLERANCE)


def test_float64_agrees_to_float64_rounding():
    """Nothing on the way is rounded to float32; the worst is the CANS table, at 1e-13."""
    with jax.enable_x64(True):
        variants = [
            ours_and_theirs(polar="svd", norm="row_col", weight_decay=0.1),
            ours_and_theirs(ns_coeffs="cans", ns_steps=5, norm="none"),
            ours_and_theirs(ns_coeffs="polar_express", ns_steps=10, norm="none"),
            ours_and_theirs(preconditioning="aol", consistent_rms=0.2, adaptive=True),
        ]
        check(variants, *random_trees(13, np.float64), tolerance=1e-12)


def test_compute_dtype_changes_the_products_only():
    """bfloat16 products: visibly rounded, close to the oracle, unit rows to float32 rounding."""
    params, grads = random_trees(14)
    options = {"compute_dtype": jnp.bfloat16, "norm": "col_row", "shape_scale": "none"}
    (updates,) = updates_of([omp.scale_by_muonplus(**options)], params, grads)
    expected = oracle_of(params, grads, norm="col_row", shape_scale="none")
    for key in SHAPES:
        update = np.asarray(updates[key])
        error = np.linalg.norm(update + expected[key]) / np.linalg.norm(expected[key])
        # bfloat16 keeps 8 bits, 4e-3 of a product; 0.02 was measured on the square matrix, whose
        # small singular values amplify it.
        assert 1e-4 < error < 0.06, f"{key}: {error}"
        assert update.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(update, axis=1), 1, rtol=1e-6)


def test_the_oracles_cans_rows_are_the_closest_to_one():
    """A check of the oracle: each printed row is the best on what the last one left."""
    low = 1e-3
    for row in reference.CANS:
        best = reference.closest_to_one(low, 2 - low if low > 1e-3 else 1.0)
        np.testing.assert_allclose(row, best, atol=1e-4)
        low = np.dot(best, [low, low**3, low**5])
