"""Flax' example gemma: its step and transformer. Skipped where its folder is not on the path."""

import warnings

import jax
import pytest
from flax import nnx

from tests.support.hosts import assert_falls, readings

pytest.importorskip("transformer_cfg", exc_type=ImportError)  # a file of examples/gemma
with warnings.catch_warnings(action="ignore"):  # what its packages warn of is not ours
    host = pytest.importorskip("examples.hosts.gemma")

pytestmark = pytest.mark.filterwarnings("ignore")

JUDGED = {
    "embedder/embedding": "adam",
    "final_norm/scale": "adam",
    "layers/{0..1}/attn/attn_vec_einsum/kernel": "32x32x1",
    "layers/{0..1}/attn/kv_einsum/kernel": "8x32x2",  # keys and values of one head
    "layers/{0..1}/attn/q_einsum/kernel": "32x32x1",
    "layers/{0..1}/mlp/down_proj/kernel": "32x64x1",
    "layers/{0..1}/mlp/gate_proj/kernel": "64x32x1",
    "layers/{0..1}/mlp/up_proj/kernel": "64x32x1",
    "layers/{0..1}/pre_attention_norm/scale": "adam",
    "layers/{0..1}/pre_ffw_norm/scale": "adam",
}


def test_the_example_trains_and_every_leaf_is_read_as_judged():
    assert readings(nnx.state(host.transformer(), nnx.Param)) == JUDGED
    schedule = host.gemma.create_learning_rate_schedule(3e-3, 5)
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which gemma needs
        optimizer, losses = host.train(host.muonplus(schedule), steps=20)
    assert_falls(losses, to=0.6)
    # What gemma's train.py logs of the optimizer: a MaskedNode has no shape.
    for name, variable in nnx.to_flat_state(nnx.state(optimizer)):
        assert isinstance(variable.get_value(), jax.Array), name
        assert variable.shape is not None
