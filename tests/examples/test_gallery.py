"""The compositions of the gallery, each against its formula in NumPy."""

import jax
import numpy as np
import optax
import pytest

from examples import gallery
from tests.support import reference

RNG = np.random.default_rng(0)

W, G = RNG.normal(size=(20, 12)), RNG.normal(size=(20, 12))  # (out, in)


def update(rule, w=W, g=G):
    """Of a kernel as Flax stores it; the matrix comes back."""
    params = {"up": {"kernel": w.T.astype(np.float32)}}
    grads = {"up": {"kernel": g.T.astype(np.float32)}}
    return rule.update(grads, rule.init(params), params)[0]["up"]["kernel"].T


def rows(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def columns(x):
    return x / np.linalg.norm(x, axis=0, keepdims=True)


def polar(x):
    return reference.newton_schulz(x)


def sinkhorn(x, turns):
    m, n = x.shape
    for _ in range(turns):
        x = np.sqrt(m) * columns(np.sqrt(n) * rows(x))
    return x


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (gallery.rmnp(), np.sqrt(20 / 12) * rows(G)),
        (gallery.muon_rms_norm(), 0.2 * np.sqrt(12) * rows(polar(G))),
        (gallery.sink_gd(3), sinkhorn(G, 3)),
    ],
    ids=["rmnp", "muon_rms_norm", "sink_gd"],
)
def test_updates_equal_their_formula(rule, expected):
    np.testing.assert_allclose(update(rule), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_rule_on_a_whole_model_with_decay_and_adamw():
    params = {"up": {"kernel": W.T.astype(np.float32), "bias": np.ones(20, np.float32)}}
    grads = jax.tree.map(np.ones_like, params)
    tx = gallery.whole(gallery.rmnp(), 0.1, weight_decay=0.5)
    updates, _ = tx.update(grads, tx.init(params), params)
    after = optax.apply_updates(params, updates)
    step = np.sqrt(20 / 12) * rows(np.ones((20, 12))) + 0.5 * W * (W >= 0)
    np.testing.assert_allclose(after["up"]["kernel"].T, W - 0.1 * step, atol=1e-5)
    np.testing.assert_allclose(after["up"]["bias"], 0.9 * (1 - 1e-5), rtol=1e-4)
