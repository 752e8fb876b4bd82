"""Hyperball, which holds the norms of matrices."""

import jax
import numpy as np
import pytest

import optax_muonplus as omp
from optax_muonplus.contrib import NorMuon
from tests.support.contrib import build, run, trees


def test_hyperball_keeps_the_norm_of_each_matrix_and_of_each_step():
    """Around any rule, whose size has no effect; and a rate of zero changes nothing."""
    params, grads = trees()
    small = omp.matrix_chain(NorMuon(), lambda x: 1e-20 * x)
    for rate, link in ((0.3, NorMuon()), (0.3, small), (0.0, NorMuon())):
        tx = omp.contrib.hyperball(rate, link)
        (first, *_, last), _ = run(tx, params, grads)
        for key, w in params.items():
            norm = np.linalg.norm(w)
            assert np.linalg.norm(last[key]) == pytest.approx(norm, rel=1e-6)
            # Of a U across W, the chord of an angle whose tangent is the rate: 0.290 R.
            moved = np.linalg.norm(first[key] - w) / norm
            assert moved == pytest.approx(rate, rel=0.1)
    both = (omp.contrib.hyperball(0.3, link) for link in (NorMuon(), small))
    one, other = (run(tx, params, grads)[0] for tx in both)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), one, other)


@pytest.mark.parametrize("traced", [False, True])
def test_hyperball_refuses_matrices_of_zeros_that_it_sees(traced):
    params = {"up": np.ones((2, 4, 6), np.float32) * np.array([1, 0], np.float32)[:, None, None]}
    dims = {"up": omp.MuonDimensionNumbers(1, 2)}
    init = build("hyperball", weight_dimension_numbers=dims).init
    if traced:
        jax.jit(init)(params)
    else:
        with pytest.raises(ValueError, match=r"up has a matrix of zeros.*random initial values"):
            init(params)


def test_what_is_no_number_is_not_called_zero():
    build("hyperball").init({"up": np.full((4, 6), np.nan, np.float32)})
