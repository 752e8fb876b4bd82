"""The parameters of models: the paper's sizes, groups, updates of stacks, and sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_muonplus as omp
from examples.trainer import models
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.presets import SIZES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers, sharding
from tests.support.model_trees import leaves, stacked
from tests.support.trainer import (
    ADAMW_RULE,
    CUBE,
    assemble_toy,
    compiled_step,
)

GPT = ModelConfig(n_layer=3, n_head=2, d_model=16, d_ff=40, context=12)

LLAMA = dataclasses.replace(GPT, family="llama", tied=False)

FAMILIES = {
    "gpt": GPT,
    "separate gpt": dataclasses.replace(GPT, qkv="separate"),
    "gated gpt": dataclasses.replace(GPT, mlp="swiglu"),
    "llama": LLAMA,
}

V = 50


def split(config, vocab_size=V):
    """The model as a function of parameters and tokens, and its first parameters."""
    graph, state = nnx.split(models.build(config, vocab_size, nnx.Rngs(0)))
    return lambda params, tokens: nnx.merge(graph, params)(tokens), nnx.to_pure_dict(state)


def shapes(config, vocab_size=V):
    """The parameters without their numbers."""
    model = nnx.eval_shape(lambda: models.build(config, vocab_size, nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


# The tables count GPT with these positions: Small, Large and Huge with the 1024 of GPT-2, Base with
# 8192. The recipes have as many as a sequence has tokens, which moves their counts by up to 1.2%.
POSITIONS = {"gpt-small": 1024, "gpt-base": 8192, "gpt-large": 1024, "gpt-huge": 1024}


# A list of blocks takes seconds to trace and has the same numbers: the smallest stands for all.
@pytest.mark.parametrize(
    ("name", "scan"), [*((name, True) for name in SIZES), ("llama-60m", False)]
)
def test_parameter_counts_of_the_paper(name, scan):
    size = SIZES[name]
    config = ModelConfig(
        family=size.family,
        n_layer=size.n_layer,
        n_head=size.n_head,
        d_model=size.d_model,
        d_ff=size.d_ff,
        context=POSITIONS.get(name, 1024),
        tied=size.family == "gpt",
        scan=scan,
    )
    count = sum(x.size for x in jax.tree.leaves(shapes(config, size.vocab_size)))
    assert count / 1e6 == pytest.approx(size.million, rel=0.004)


def test_default_hidden_widths():
    assert shapes(dataclasses.replace(GPT, d_ff=None))["blocks"][0]["mlp"]["up"][
        "kernel"
    ].shape == (
        16,
        64,
    )
    gate = shapes(dataclasses.replace(LLAMA, d_ff=None))["blocks"][0]["mlp"]["gate"]["kernel"]
    assert gate.shape == (16, 42)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_blocks_are_the_matrices(family, tied, scan):
    params = shapes(dataclasses.replace(FAMILIES[family], tied=tied, scan=scan))
    numbers = optimizers.whole_kernels if scan else None  # unstacked, by the default rules
    labels = leaves(omp.partition_labels(params, numbers))
    matrices = {path for path, label in labels.items() if label == "muon"}
    assert matrices == {path for path in labels if "blocks" in path and path.endswith("kernel")}
    assert len(matrices) == {"gpt": 4, "separate gpt": 6, "gated gpt": 5, "llama": 7}[family] * (
        1 if scan else 3
    )
    table = optimizers.describe(OptimizerConfig(), params)
    assert (
        f"{len(matrices)} parameters, {3 * len(matrices) // (1 if scan else 3)} matrices" in table
    )
    assert "40x16x3" in table if scan else "40x16x1" in table  # out x in x layers


def test_default_rules_do_not_take_stacked_kernels_for_heads():
    # (layer, in, out) has as many axes as Flax's (in, head, out of a head): only a rule can tell.
    params = shapes(dataclasses.replace(GPT, scan=True))
    qkv = optimizers.whole_kernels(params)["blocks"]["attn"]["qkv"]["kernel"]
    assert qkv == omp.MuonDimensionNumbers(1, 2)
    with pytest.raises(ValueError, match="blocks/mlp"):
        omp.muon_dimension_numbers(params)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_stacked_blocks_are_updated_like_a_list_of_them(family):
    _, params = split(FAMILIES[family])
    grads = jax.tree.map(lambda x: jnp.sin(1000 * x), params)
    rule = optimizers.build(OptimizerConfig(), steps=10)
    update = jax.jit(lambda grads, params: rule.update(grads, rule.init(params), params)[0])
    each, together = update(grads, params), update(stacked(grads), stacked(params))
    for path, one in leaves(stacked(each)).items():
        np.testing.assert_allclose(one, leaves(together)[path], atol=1e-6, err_msg=path)


# With stacked blocks, as the recipes have them; test_sharded_training.py has lists of blocks.
LLAMA_FIELDS = {"family": "llama", "tied": False}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_sharded(family, scan):
    params = shapes(dataclasses.replace(FAMILIES[family], tied=False, scan=scan))
    mesh = sharding.make_mesh(CUBE, jax.devices())
    placed = leaves(sharding.of_params(params, mesh))
    up = placed["blocks/mlp/up/kernel" if scan else "blocks/0/mlp/up/kernel"].spec
    assert up == jax.P(*[None][: int(scan)], "fsdp", "tensor")
    for path, sharded in placed.items():
        if path.endswith("mlp/gate/kernel"):
            assert sharded.spec == up
        elif path.endswith(("gate/bias", "up/bias")):
            assert sharded.spec == jax.P(*[None][: int(scan)], "tensor")
    assert not sharding.undivided(params, mesh)


def test_remat_of_llama_saves_memory(text):
    size = {"n_layer": 4, "context": 64, "d_model": 32, "scan": True, **LLAMA_FIELDS}
    plain, remat = (
        assemble_toy(text, "", 1, remat=on, optimizer=ADAMW_RULE, **size) for on in ("none", "full")
    )
    # By default the CPU schedules for concurrency, and computes again long before it has to.
    scheduler = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    memory = [
        compiled_step(toy, **scheduler).memory_analysis().temp_size_in_bytes
        for toy in (plain, remat)
    ]
    assert memory[1] < 0.8 * memory[0]
