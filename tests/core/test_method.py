"""The paper's Algorithm 1 for one matrix, against the float64 oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_muonplus._core.momentum import muon_plus
from optax_muonplus._core.newton_schulz import newton_schulz
from optax_muonplus._core.normalize import Normalize
from optax_muonplus._core.orthogonalize import Orthogonalize
from optax_muonplus._core.scale import ScaleByShape
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
            normalize=Normalize(norm, match_frobenius=False),
            scale=ScaleByShape("spectral"),
        )
        direction, theirs = reference.momentum(theirs, g, t, 0.9, nesterov)
        factor = reference.norm_dir(reference.newton_schulz(direction, "you", 6), norm)
        expected = reference.shape_factor(*shape, "spectral") * factor
        np.testing.assert_allclose(update, expected, atol=TOLERANCE)


def test_the_last_row_serves_for_steps_beyond_the_rows():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.float32)
    first, last = (3.0, -3.2, 1.2), (2.0, -1.5, 0.5)
    expected = newton_schulz(x, (first, last, last, last))
    for steps in (4, jnp.asarray(4)):
        found = newton_schulz(x, (first, last), steps=steps)
        np.testing.assert_allclose(found, expected, atol=1e-6)
