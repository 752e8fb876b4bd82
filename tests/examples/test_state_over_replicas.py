"""Training with a state that is sharded over the replicas of the parameters (ZeRO-1)."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

from examples.trainer.settings.run import OptimizerConfig
from tests.support.trainer import CUBE, assemble_toy, first_losses


@pytest.mark.parametrize(("name", "record_every"), [("muonplus", 2), ("normuon", 0)])
def test_moments_over_data_change_no_loss(name, record_every, text):
    """With the moments of AdamW, which both have for the embeddings."""
    given = {"shard_over_data": True, "learning_rate": 0.02, "record_every": record_every}
    rule = OptimizerConfig(name=name, **given)
    cut, whole = (
        assemble_toy(text, CUBE, n_layer=2, scan=True, optimizer=optimizer)
        for optimizer in (rule, dataclasses.replace(rule, shard_over_data=False, record_every=0))
    )
    assert first_losses(cut, 4) == pytest.approx(first_losses(whole, 4), abs=1e-5)
    for toy, spec in ((cut, P("data", "fsdp", "tensor")), (whole, P(None, "fsdp", "tensor"))):
        state = toy.init()
        (first, *_) = (
            x
            for path, x in jax.tree.leaves_with_path(state.opt_state)
            if jax.tree_util.keystr(path, simple=True, separator="/").endswith("mlp/up/kernel")
        )
        assert first.sharding.spec == spec
