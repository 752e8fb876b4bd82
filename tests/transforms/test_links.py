"""The links of the chain one by one, and chained by hand."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support import reference
from tests.support.oracle_runs import DIMS, SHAPES, random_trees, updates_of
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
