"""kauldron: its trainer on a Linen model. Skipped where kauldron is not installed."""

import warnings

import jax
import pytest

import optax_muonplus as omp
from tests.support.hosts import assert_falls, readings

pytest.importorskip("kauldron", exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):  # what its packages warn of is not ours
    host = pytest.importorskip("examples.hosts.kauldron")

pytestmark = pytest.mark.filterwarnings("ignore")

JUDGED = {
    "LayerNorm_{0..1}/bias": "adam",
    "LayerNorm_{0..1}/scale": "adam",
    **{f"attention/{name}/bias": "adam" for name in ("key", "out", "query", "value")},
    **{f"attention/{name}/kernel": "32x32x1" for name in ("key", "out", "query", "value")},
    "down/bias": "adam",
    "down/kernel": "32x128x1",
    "embed/embedding": "adam",
    "head/bias": "adam",
    "head/kernel": "adam",
    "up/bias": "adam",
    "up/kernel": "128x32x1",
}


def test_the_example_trains_and_every_leaf_is_read_as_judged():
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which kauldron needs
        state, losses = host.train(omp.muonplus(0.02, adam_learning_rate=5e-3), steps=20)
    assert readings(state.params) == JUDGED
    assert_falls(losses, to=0.6)
