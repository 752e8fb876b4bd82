"""The fused projection to queries, keys and values: to the optimizer by head, and on a mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from examples.compiled_programs import counts, hlo
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers
from tests.support.trainer import CUBE, assemble_toy, compiled_step, first_losses

K, HEADS = 4, 3


@pytest.mark.parametrize("name", ["muonplus", "muon", "normuon"])
def test_each_head_has_matrices_for_query_key_and_value(name):
    config = OptimizerConfig(name=name, clip_norm=None)
    grad, kernel = jax.random.normal(jax.random.key(0), (2, 16, 3 * HEADS * K))
    starts = range(0, 3 * HEADS * K, K)
    blocks = [(grad[:, i : i + K], kernel[:, i : i + K]) for i in starts]

    def updates(config, grads, params):
        rule = optimizers.build(config, steps=10, head_size=K)
        return jax.jit(lambda g, p: rule.update(g, rule.init(p), p)[0])(grads, params)

    whole = [{"attn": {"qkv": {"kernel": x}}} for x in (grad, kernel)]
    found = updates(dataclasses.replace(config, per_head=True), *whole)
    alone = updates(config, *(dict(enumerate(x)) for x in zip(*blocks, strict=True)))
    expected = np.concatenate(list(alone.values()), axis=1)
    np.testing.assert_allclose(found["attn"]["qkv"]["kernel"], expected, rtol=1e-4, atol=1e-6)


def test_fused_projection_adds_no_collective(text):
    """The three products of the separate form are one, with the gathers and sums of one."""
    steps = {}
    for qkv in ("fused", "separate"):
        toy = assemble_toy(text, CUBE, qkv=qkv, scan=True, n_layer=2)
        steps[qkv] = counts.count(hlo.read_program(compiled_step(toy)))
    for fused, separate in zip(*steps.values(), strict=True):
        for kind in (*fused.collectives, *separate.collectives):
            assert fused.collectives[kind] <= separate.collectives[kind], kind
            assert fused.received[kind] <= separate.received[kind], kind
        # Of each layer's kernel, forward and backward, two less.
        assert fused.collectives["all-gather"] <= separate.collectives["all-gather"] - 8


def test_no_device_needs_the_heads_of_another(text):
    """Whole heads lie on each device: attention moves no queries, keys or values."""
    toy = assemble_toy(text, "data=4,tensor=2", n_layer=1, optimizer=OptimizerConfig(name="adamw"))
    (found,) = counts.count(hlo.read_program(compiled_step(toy)))
    # No parameter is on fsdp, so the embeddings alone are gathered, and nothing changes places.
    assert not found.collectives["all-to-all"] and not found.collectives["collective-permute"]


@pytest.mark.parametrize(("scan", "per_head"), [(False, False), (True, True)])
def test_fused_projection_on_a_mesh_trains_as_on_one_device(scan, per_head, text):
    rule = OptimizerConfig(learning_rate=0.1, per_head=per_head)
    changes = {"n_layer": 2, "scan": scan, "optimizer": rule, "accumulate": 2}
    eight, one = (
        first_losses(assemble_toy(text, *mesh, **changes), 4) for mesh in ((CUBE, 8), ("", 1))
    )
    assert eight == pytest.approx(one, abs=1e-5)
    assert one[-1] < one[0] - 0.1


@pytest.mark.parametrize("which", ["attention", "mlp"])
def test_heads_where_only_a_part_is_normalized(which):
    """The part without attention has no heads, and is updated as ever."""
    qkv, up = jax.random.normal(jax.random.key(0), (2, 16, 3 * HEADS * K))
    grads = {"attn": {"qkv": {"kernel": qkv}}, "mlp": {"up": {"kernel": up}}}

    def updates(**changes):
        config = OptimizerConfig(per_head=True, clip_norm=None, **changes)
        rule = optimizers.build(config, steps=10, head_size=K)
        return jax.jit(lambda g: rule.update(g, rule.init(g), g)[0])(grads)

    mixed, plus, muon = updates(normalized=which), updates(), updates(name="muon")
    expected = plus if which == "attention" else muon
    np.testing.assert_allclose(
        mixed["attn"]["qkv"]["kernel"], expected["attn"]["qkv"]["kernel"], atol=1e-6
    )
    expected = plus if which == "mlp" else muon
    np.testing.assert_allclose(
        mixed["mlp"]["up"]["kernel"], expected["mlp"]["up"]["kernel"], atol=1e-6
    )
