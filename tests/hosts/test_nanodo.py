"""nanodo: its `Trainer` on its transformer. Skipped where nanodo is not on the path."""

import warnings

import jax
import pytest

from tests.support.hosts import assert_falls, readings

pytest.importorskip("nanodo", exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):  # what its packages warn of is not ours
    host = pytest.importorskip("examples.hosts.nanodo")

pytestmark = pytest.mark.filterwarnings("ignore")

JUDGED = {
    "blocks_{0..1}/CausalAttn_0/attn_out_proj/kernel": "32x32x1",
    "blocks_{0..1}/CausalAttn_0/key/kernel": "32x32x1",
    "blocks_{0..1}/CausalAttn_0/query/kernel": "32x32x1",
    "blocks_{0..1}/CausalAttn_0/value/kernel": "32x32x1",
    "blocks_{0..1}/LayerNorm_{0..1}/scale": "adam",
    "blocks_{0..1}/Mlp_0/Dense_0/kernel": "128x32x1",
    "blocks_{0..1}/Mlp_0/Dense_1/kernel": "32x128x1",
    "embed/embedding": "adam",
    "out_ln/scale": "adam",
    "pos_embed/embedding": "adam",
}


def test_the_example_trains_and_every_leaf_is_read_as_judged():
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which nanodo needs
        trainer, losses = host.train("muonplus", 0.02, steps=20)
    assert readings(trainer.state.params) == JUDGED
    assert_falls(losses, to=0.6)
    assert trainer.step == 20
