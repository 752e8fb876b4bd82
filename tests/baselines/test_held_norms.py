"""Hyperball and Muown, which hold the norms of matrices and of rows."""

import jax
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.baselines import NorMuon
from optax_muonplus.baselines._muown import MuownState
from tests.support.baselines import SHAPES, build, run, trees


def test_hyperball_keeps_the_norm_of_each_matrix_and_of_each_step():
    """Around any rule, whose size has no effect; and a rate of zero changes nothing."""
    params, grads = trees()
    small = omp.matrix_chain(NorMuon(), lambda x: 1e-20 * x)
    for rate, link in ((0.3, NorMuon()), (0.3, small), (0.0, NorMuon())):
        tx = omp.baselines.hyperball(rate, link)
        (first, *_, last), _ = run(tx, params, grads)
        for key, w in params.items():
            norm = np.linalg.norm(w)
            assert np.linalg.norm(last[key]) == pytest.approx(norm, rel=1e-6)
            # Of a U across W, the chord of an angle whose tangent is the rate: 0.290 R.
            moved = np.linalg.norm(first[key] - w) / norm
            assert moved == pytest.approx(rate, rel=0.1)
    both = (omp.baselines.hyperball(0.3, link) for link in (NorMuon(), small))
    one, other = (run(tx, params, grads)[0] for tx in both)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), one, other)


@pytest.mark.parametrize("traced", [False, True])
def test_hyperball_refuses_matrices_of_zeros_that_it_sees(traced):
    params = {"up": np.ones((2, 4, 6), np.float32) * np.array([1, 0], np.float32)[:, None, None]}
    dims = {"up": omp.MuonDimensionNumbers(1, 2)}
    init = build("hyperball", muon_weight_dimension_numbers=dims).init
    if traced:
        jax.jit(init)(params)
    else:
        with pytest.raises(ValueError, match=r"up has a matrix of zeros.*random initial values"):
            init(params)


def test_what_is_no_number_is_not_called_zero():
    build("hyperball").init({"up": np.full((4, 6), np.nan, np.float32)})


def test_muown_holds_sizes_and_directions_of_rows():
    """A size that Adam takes through zero turns its row around, and a row of zeros moves."""
    params, grads = trees()
    params["tall"][:, 0], params["tall"][:, 1] = 0, 1e-4 * params["tall"][:, 1]
    seen, state = run(build("muown"), params, grads)
    (muown,) = (s for s in jax.tree.leaves(state, is_leaf=is_muown) if is_muown(s))
    for key in SHAPES:
        norms = np.linalg.norm(seen[-1][key], axis=0)
        np.testing.assert_allclose(np.abs(muown.magnitude[key][0]), norms, rtol=1e-5)
    assert muown.magnitude["tall"][0, 1] < 0
    assert np.linalg.norm(seen[-1]["tall"][:, 0]) > 0.01


def test_muown_goes_on_from_sizes_of_zero():
    params, grads = trees()
    tx = build("muown", 0.5, weight_decay=2.0)  # the first step takes all of it
    seen, _ = run(tx, params, [jax.tree.map(np.zeros_like, params), *grads])
    assert all(np.abs(x).max() < 1e-11 for x in jax.tree.leaves(seen[0]))
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(seen[-1]))


def is_muown(x):
    return isinstance(x, MuownState)
