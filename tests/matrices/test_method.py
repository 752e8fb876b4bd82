"""The paper's Algorithm 1 for one matrix, against the float64 oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_muonplus.method import Normalize, Orthogonalize, ScaleByShape, look_ahead, muon_plus
from tests.support import reference
from tests.support.oracle_runs import TOLERANCE


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("norm", ["col_row", "row", "none"])
def test_three_updates_are_those_of_the_paper(shape, nesterov, norm):
    rng = np.random.default_rng(0)
    ours, theirs = jnp.zeros(shape), np.zeros(shape)
    for t in range(1, 4):
        g = rng.standard_normal(shape)
        update, ours = muon_plus(
            jnp.asarray(g, jnp.float32),
            ours,
            0.9,
            nesterov=nesterov,
            orthogonalize=Orthogonalize("you", 6),
            normalize=Normalize(norm),
            scale=ScaleByShape("spectral"),
        )
        direction, theirs = reference.momentum(theirs, g, t, 0.9, nesterov)
        factor = reference.norm_dir(reference.newton_schulz(direction, "you", 6), norm)
        expected = reference.shape_factor(*shape, "spectral") * factor
        np.testing.assert_allclose(update, expected, atol=TOLERANCE)


@pytest.mark.parametrize("nesterov", [True, False])
def test_bias_correction_divides_by_what_the_zero_start_left_out(nesterov):
    g = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    m = np.zeros_like(g)
    for t in range(1, 4):
        expected, m = reference.momentum(m, g, t, 0.9, nesterov, bias_correction=True)
        kept = jnp.asarray(m, jnp.float32)
        found = look_ahead(kept, jnp.asarray(g) if nesterov else None, 0.9, t, 2.0)
        np.testing.assert_allclose(2 * found, expected, rtol=1e-6)
