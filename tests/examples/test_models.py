"""What models compute, the sizes, beginnings, groups and places of their parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from examples.trainer.models import sharding
from examples.trainer.settings.command_line import PRESETS
from examples.trainer.settings.run import ModelConfig, OptimizerConfig, training_flops_per_token
from examples.trainer.training import optimizers
from examples.trainer.training.step import init_params, make_forward
from tests.support.model_trees import leaves, stacked
from tests.support.trainer import CUBE

GPT = ModelConfig(n_layer=3, n_head=2, d_model=16, d_ff=40, context=12)
LLAMA = dataclasses.replace(GPT, family="llama", tied=False)
FAMILIES = {"gpt": GPT, "llama": LLAMA}
V = 50
TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, V)


@functools.cache
def split(config):
    """The model as a function of parameters and tokens, and its first parameters."""
    forward, _ = make_forward(config, V, sharding.make_mesh("", jax.devices()[:1]))
    return jax.jit(forward), init_params(config, V, 0)


@pytest.mark.parametrize(
    ("family", "remats"),
    [("gpt", ["none"]), ("llama", ["none", "full"])],
)
def test_scan_and_list_give_the_same(family, remats):
    apply, params = split(FAMILIES[family])

    def loss(apply, params):
        losses = optax.softmax_cross_entropy_with_integer_labels(apply(params, TOKENS), TOKENS)
        return jnp.mean(losses)

    each, grads = jax.jit(jax.value_and_grad(functools.partial(loss, apply)))(params)
    for remat in remats:
        config = dataclasses.replace(FAMILIES[family], scan=True, remat=remat)
        scanned, own = split(config)
        assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, stacked(params))
        run = jax.jit(jax.value_and_grad(functools.partial(loss, scanned)))
        one, own_grads = run(stacked(params))
        assert float(one) == pytest.approx(float(each), abs=1e-6)
        for path, grad in leaves(stacked(grads)).items():
            np.testing.assert_allclose(leaves(own_grads)[path], grad, atol=1e-6, err_msg=path)


def test_layers_of_a_stack_begin_differently():
    _, params = split(dataclasses.replace(LLAMA, scan=True))
    kernel = np.asarray(params["blocks"]["attn"]["query"]["kernel"])
    assert np.std(kernel) == pytest.approx(0.02, rel=0.1)
    assert np.abs(np.corrcoef(kernel.reshape(3, -1)) - np.eye(3)).max() < 0.2


@pytest.mark.parametrize("family", FAMILIES)
def test_no_position_sees_a_later_one(family):
    apply, params = split(FAMILIES[family])
    changed = TOKENS.at[:, 7].set((TOKENS[:, 7] + 1) % V)
    before, after = apply(params, TOKENS), apply(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7:] - after[:, 7:]).max(axis=(0, 2)).min() > 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_keeps_float32_parameters(family):
    config = dataclasses.replace(FAMILIES[family], compute_dtype="bfloat16")
    apply, params = split(config)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert "bf16[" in str(jax.make_jaxpr(apply)(params, TOKENS))
    exact, _ = split(dataclasses.replace(config, compute_dtype="float32"))
    logits = apply(params, TOKENS)
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa, of logits near 0.1.
    np.testing.assert_allclose(logits, exact(params, TOKENS), atol=0.01)


TWO = ModelConfig(n_layer=2, n_head=3, d_model=24, context=12)
TWO_LLAMA = dataclasses.replace(TWO, family="llama", tied=False)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("config", "scaled"), [(TWO, True), (TWO_LLAMA, False)])
def test_output_projections_begin_smaller_in_deeper_models(config, scaled, scan):
    _, params = split(dataclasses.replace(config, d_model=96, scan=scan))  # of two layers
    for path, x in leaves(params).items():
        if path.endswith(("kernel", "embedding")):
            smaller = scaled and path.endswith(("out/kernel", "down/kernel"))
            assert np.std(x) == pytest.approx(0.01 if smaller else 0.02, rel=0.06), path


@pytest.mark.parametrize("config", [TWO, TWO_LLAMA])
def test_operations_count_each_weight_that_multiplies(config):
    _, params = split(config)
    weights = sum(x.size for path, x in leaves(params).items() if path.endswith("kernel"))
    weights += V * config.d_model if config.tied else 0  # the head, which is the embedding then
    attention = config.n_layer * config.context * config.d_model
    assert training_flops_per_token(config, V) == 6 * (weights + attention)


# Parameters


def shapes(config, vocab_size=V):
    """The parameters without their numbers."""
    return jax.eval_shape(lambda: init_params(config, vocab_size, 0))


# The tables count GPT with these positions: Small, Large and Huge with the 1024 of GPT-2, Base with
# 8192. The recipes have as many as a sequence has tokens, which moves their counts by up to 1.2%.
POSITIONS = {"gpt-small": 1024, "gpt-base": 8192, "gpt-large": 1024, "gpt-huge": 1024}


COUNTS = {
    "gpt-small": 124,
    "gpt-base": 362,
    "gpt-large": 774,
    "gpt-huge": 6654,
    "llama-60m": 58,
    "llama-130m": 134,
    "llama-350m": 368,
    "llama-1b": 1339,
    "llama-7b": 6738,
}
"""Millions of parameters, from the paper's tables of architectures."""


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_of_the_paper(name):
    config = dataclasses.replace(PRESETS[name][1].model, context=POSITIONS.get(name, 1024))
    tokens = 50_257 if config.family == "gpt" else 32_000
    count = sum(x.size for x in jax.tree.leaves(shapes(config, tokens)))
    assert count / 1e6 == pytest.approx(COUNTS[name], rel=0.004)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_blocks_are_the_matrices(family, tied, scan):
    params = shapes(dataclasses.replace(FAMILIES[family], tied=tied, scan=scan))
    numbers = optimizers.matrices if scan else None  # unstacked, by the default rules
    labels = leaves(omp.Matrices(weight_dimension_numbers=numbers).read(params).labels)
    matrices = {path for path, label in labels.items() if label == "muon"}
    assert matrices == {path for path in labels if "blocks" in path and path.endswith("kernel")}
    assert len(matrices) == {"gpt": 4, "llama": 7}[family] * (1 if scan else 3)
    table = optimizers.describe(OptimizerConfig(), params)
    assert (
        f"{len(matrices)} parameters, {3 * len(matrices) // (1 if scan else 3)} matrices" in table
    )
    assert "40x16x3" in table if scan else "40x16x1" in table  # out x in x layers


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_stacked_blocks_are_updated_like_a_list_of_them(family):
    _, params = split(FAMILIES[family])
    grads = jax.tree.map(lambda x: jnp.sin(1000 * x), params)
    rule = optimizers.build(OptimizerConfig(), steps=10)
    update = jax.jit(lambda grads, params: rule.update(grads, rule.init(params), params)[0])
    each, together = update(grads, params), update(stacked(grads), stacked(params))
    for path, one in leaves(stacked(each)).items():
        np.testing.assert_allclose(one, leaves(together)[path], atol=1e-6, err_msg=path)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_sharded(family, scan):
    params = shapes(dataclasses.replace(FAMILIES[family], tied=False, scan=scan))
    mesh = sharding.make_mesh(CUBE, jax.devices())
    placed = leaves(sharding.of_params(params, mesh))
    up = placed["blocks/mlp/up/kernel" if scan else "blocks/0/mlp/up/kernel"].spec
    assert up == jax.P(*[None][: int(scan)], "fsdp", "tensor")
    assert placed["wte/embedding"].spec == jax.P("tensor", "fsdp")
    assert placed["lm_head/kernel"].spec == jax.P("fsdp", "tensor")
    for path, sharded in placed.items():
        if path.endswith("mlp/gate/kernel"):
            assert sharded.spec == up
        elif path.endswith("attn/out/kernel"):
            assert sharded.spec == jax.P(*[None][: int(scan)], "tensor", "fsdp")
        elif path.endswith("up/bias"):
            assert sharded.spec == jax.P(*[None][: int(scan)], "tensor")
