"""The links of the chain one by one, and chained by hand."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support import reference
from tests.support.oracle_runs import DIMS, NORMS, SHAPES, random_trees, updates_of
from tests.support.trees import random_tree


def test_links_refuse_leaves_that_are_not_matrices():
    params = {"embed": {"kernel": jnp.ones((9, 4))}, "up": {"kernel": jnp.ones((4, 6))}}
    for link in (
        omp.orthogonalize(),
        omp.normalize(),
        omp.scale_by_shape(),
        omp.scale_by_muonplus(),
    ):
        with pytest.raises(ValueError, match=r"Not matrices: embed/kernel.*partition_labels"):
            link.init(params)


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


def test_links_chained_by_hand_are_the_alias():
    params, grads = random_trees(10)
    common = {"norm": "row_col", "match_frobenius": True}
    polar = {"ns_coeffs": "polar_express", "ns_steps": 4, "eps": 0.1, "preconditioning": "aol"}
    momentum = {"beta": 0.7, "nesterov": True, "bias_correction": True}
    tail = [optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.3)]
    links = [
        omp.momentum(**momentum),
        omp.orthogonalize(**polar, where=omp.Matrices(weight_dimension_numbers=DIMS)),
        omp.normalize(norm_eps=1e-3, **common, where=omp.Matrices(weight_dimension_numbers=DIMS)),
        omp.scale_by_shape("max", where=omp.Matrices(weight_dimension_numbers=DIMS)),
    ]
    matrix_part = {
        **momentum, **polar, **common,
        "norm_eps": 1e-3, "shape_scale": "max",
    }  # fmt: skip
    part = omp.scale_by_muonplus(**matrix_part, where=omp.Matrices(weight_dimension_numbers=DIMS))
    by_hand, part, alias = updates_of(
        [
            optax.chain(*links, *tail),
            optax.chain(part, *tail),
            omp.muonplus(
                0.3,
                weight_decay=0.1,
                **matrix_part,
                muon_weight_dimension_numbers=DIMS,
            ),
        ],
        params,
        grads,
    )
    for key in SHAPES:
        np.testing.assert_allclose(part[key], by_hand[key], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(alias[key], by_hand[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("chain", [optax.chain, omp.matrix_chain])
@pytest.mark.parametrize("stored", [(64, 64), (64, 256), (256, 64), (16, 1024)])
def test_a_consistent_rms_is_that_of_any_composition(chain, stored):
    """A factor by shape alone would give 0.4 and 1.6 for 0.2 where rows were normalized before."""
    grads = {"kernel": random_tree([stored])[0]}
    for links in (
        [omp.normalize("row", match_frobenius=False)],
        [omp.normalize()],
        [omp.matrix_chain(jnp.sign)],
        [],
    ):
        rms = omp.scale_by_shape(consistent_rms=0.2)
        tx = chain(omp.momentum(), omp.orthogonalize(polar="svd"), *links, rms)
        updates, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(jnp.sqrt(jnp.mean(updates["kernel"] ** 2)), 0.2, rtol=1e-4)


SIDES = [norm for norm in NORMS if norm not in ("none", "long")]
STACKED = {"kernel": omp.MatrixSpec(1, 2, split_sizes=(8, 8, 16))}  # layers of fused blocks


@pytest.mark.parametrize("norm", SIDES)
def test_a_consistent_rms_is_that_of_every_matrix_that_is_normalized(norm):
    """Also of approximate polar factors: five Jordan steps give 0.7 to 1.1 of it without a norm."""
    grads = {"kernel": random_tree([(3, 12, 32)])[0]}
    where = omp.Matrices(weight_dimension_numbers=STACKED)
    for match in (True, False):
        links = [
            omp.momentum(),
            omp.orthogonalize(where=where),
            omp.normalize(norm, match_frobenius=match, where=where),
            omp.scale_by_shape(consistent_rms=0.2, where=where),
        ]
        options = {"norm": norm, "match_frobenius": match, "consistent_rms": 0.2}
        dims = {"muon_weight_dimension_numbers": STACKED}
        for tx in (
            omp.muonplus(1.0, **options, **dims),
            omp.muonplus(1.0, **options, **dims, shape_scale="spectral"),  # which it replaces
            omp.matrix_chain(*links),
            omp.matrix_chain(*links, run=omp.transforms.run_plain),
            optax.chain(*links),
        ):
            updates, _ = tx.update(grads, tx.init(grads), grads)
            blocks = np.split(np.asarray(updates["kernel"]), [8, 16], axis=2)
            sizes = [np.sqrt(np.mean(x**2, axis=(1, 2))) for x in blocks]
            np.testing.assert_allclose(sizes, 0.2, rtol=1e-5)


def test_without_a_norm_a_consistent_rms_is_that_of_an_exact_polar_factor():
    """As in Optax; the longer side of a square matrix is no norm either."""
    grads = {"kernel": random_tree([(16, 16)])[0]}
    exact = np.asarray(grads["kernel"], np.float64)
    expected = 0.2 * 4 * reference.newton_schulz(exact.T).T
    for norm in ("none", "long"):
        tx = omp.scale_by_muonplus(norm=norm, consistent_rms=0.2)
        updates, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(updates["kernel"], expected, atol=1e-5)


def test_zero_rows_stay_zero_and_the_others_have_the_rms():
    """Where rows are normalized last; columns that are normalized last have their size anyway."""
    grads = random_tree([(16, 24)])[0]
    grads = {"kernel": grads.at[:, :6].set(0)}  # of outputs
    for norm, alive in (("col_row", 18), ("row", 18), ("row_col", 24), ("col", 24)):
        tx = omp.muonplus(1.0, norm=norm, consistent_rms=0.2)
        update = np.asarray(tx.update(grads, tx.init(grads))[0]["kernel"])
        assert not update[:, :6].any()
        np.testing.assert_allclose(np.sum(update**2), 0.04 * 16 * alive, rtol=1e-5)
    zeros = {"kernel": jnp.zeros((16, 24))}
    tx = omp.muonplus(1.0, consistent_rms=0.2)
    assert not tx.update(zeros, tx.init(zeros))[0]["kernel"].any()


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_matrices_of_any_size_get_the_rms(size):
    grads = {"kernel": size * random_tree([(4, 6)])[0]}
    tx = omp.scale_by_shape(consistent_rms=0.2)
    updates, _ = tx.update(grads, tx.init(grads))
    found = jnp.sqrt(jnp.mean(updates["kernel"] ** 2))
    np.testing.assert_allclose(found, 0.2 if size else 0, rtol=1e-5)


def test_custom_polar_functions_receive_matrices_as_out_by_in():
    """Whatever the storage; here one that scales each output unit by its index."""
    params, grads = random_trees(15)

    def count_rows(x):
        return x * jnp.arange(1, len(x) + 1)[:, None]

    tx = omp.scale_by_muonplus(
        polar=count_rows, norm="col", match_frobenius=False, beta=0.5, shape_scale="none"
    )
    (updates,) = updates_of([tx], params, grads)
    for key in SHAPES:
        w = 0.5 * grads[key][0].T.astype(np.float64)
        expected = reference.norm_dir(w * np.arange(1, len(w) + 1)[:, None], "col")
        np.testing.assert_allclose(updates[key][0].T, expected, rtol=1e-5, atol=1e-6)


def test_find_momentum_returns_the_only_momentum_of_a_state():
    params, grads = random_trees(12)
    tx = optax.chain(optax.clip(1e6), omp.muonplus(0.1, beta=0.75))
    _, state = tx.update({k: g[0] for k, g in grads.items()}, tx.init(params), params)
    found = omp.transforms.find_momentum(state)
    assert isinstance(found, omp.transforms.MomentumState)
    for key in SHAPES:
        np.testing.assert_allclose(found.mu[key], 0.25 * grads[key][0], rtol=1e-6)
    for count, other in ((0, optax.sgd(0.1)), (2, optax.chain(omp.momentum(), omp.momentum()))):
        with pytest.raises(ValueError, match=f"state with {count} momentum states"):
            omp.transforms.find_momentum(other.init(params))
