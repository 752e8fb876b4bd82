"""GPT and LLaMA in the form of the paper's code: the fused block, norms and initial values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.trainer import models
from examples.trainer.settings.model import ModelConfig, training_flops_per_token
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers
from tests.support.model_trees import leaves

GPT = ModelConfig(n_layer=2, n_head=3, d_model=24, context=12)

LLAMA = dataclasses.replace(GPT, family="llama", tied=False)

V = 50

TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, V)


def split(config):
    """The model as a function of parameters and tokens, and its first parameters."""
    graph, state = nnx.split(models.build(config, V, nnx.Rngs(0)))
    return lambda params, tokens: nnx.merge(graph, params)(tokens), nnx.to_pure_dict(state)


def unfused(attn, n_head):
    """The parameters of attention with three matrices, from those with one."""
    parts = {}
    for name, x in attn["qkv"].items():
        by_head = np.asarray(x).reshape(*x.shape[:-1], n_head, 3, -1)
        for i, part in enumerate(("query", "key", "value")):
            columns = by_head[..., i, :].reshape(*x.shape[:-1], -1)
            parts.setdefault(part, {})[name] = columns
    return {**parts, "out": attn["out"]}


@pytest.mark.parametrize("config", [GPT, dataclasses.replace(LLAMA, qkv="fused")])
def test_fused_block_has_the_columns_of_each_head_together(config):
    apply, params = split(config)
    params = jax.tree.map(lambda x: x + 0.3 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params)
    separate, own = split(dataclasses.replace(config, qkv="separate"))
    blocks = {
        i: {**block, "attn": unfused(block["attn"], config.n_head)}
        for i, block in params["blocks"].items()
    }
    assert jax.tree.map(jnp.shape, {**params, "blocks": blocks}) == jax.tree.map(jnp.shape, own)
    expected = separate({**params, "blocks": blocks}, TOKENS)
    np.testing.assert_allclose(apply(params, TOKENS), expected, atol=1e-5)


def test_fused_block_is_one_matrix_to_the_optimizer():
    for scan in (False, True):
        _, params = split(dataclasses.replace(GPT, scan=scan))
        lines = optimizers.describe(OptimizerConfig(), params).splitlines()
        (line,) = (line.split() for line in lines if "qkv/kernel" in line)
        assert line[3:5] == [f"72x24x{2 if scan else 1}", "1.732"]  # out x in x batch, sqrt(3)


def test_parameters_of_the_published_gpt():
    _, params = split(GPT)
    block = {
        "ln_1": {"scale": (24,), "bias": (24,)},
        "attn": {
            "qkv": {"kernel": (24, 72), "bias": (72,)},
            "out": {"kernel": (24, 24), "bias": (24,)},
        },
        "ln_2": {"scale": (24,), "bias": (24,)},
        "mlp": {
            "up": {"kernel": (24, 96), "bias": (96,)},
            "down": {"kernel": (96, 24), "bias": (24,)},
        },
    }
    assert jax.tree.map(jnp.shape, params) == {
        "wte": {"embedding": (V, 24)},
        "wpe": {"embedding": (12, 24)},
        "blocks": {0: block, 1: block},
        "ln_f": {"scale": (24,)},
    }


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("config", "scaled"),
    [
        (GPT, True),
        (dataclasses.replace(GPT, qkv="separate"), True),
        (dataclasses.replace(GPT, depth_scaled_init=False), False),
        (LLAMA, False),
        (dataclasses.replace(LLAMA, depth_scaled_init=True), True),
    ],
)
def test_output_projections_begin_smaller_in_deeper_models(config, scaled, scan):
    _, params = split(dataclasses.replace(config, d_model=96, scan=scan))  # of two layers
    for path, x in leaves(params).items():
        if path.endswith(("kernel", "embedding")):
            smaller = scaled and path.endswith(("out/kernel", "down/kernel"))
            assert np.std(x) == pytest.approx(0.01 if smaller else 0.02, rel=0.06), path


def test_epsilons_of_norms():
    x = 1e-3 * jax.random.normal(jax.random.key(0), (3, 24), jnp.float32)
    expected = {1e-6: [], 1e-5: []}
    for epsilon, forms in expected.items():
        for mean in (np.mean(x, -1, keepdims=True), 0):  # LayerNorm, RMSNorm
            square = np.mean(np.square(x - mean), -1, keepdims=True)
            forms.append((x - mean) / np.sqrt(square + epsilon))
    gpt = models.build(GPT, V, nnx.Rngs(0))
    np.testing.assert_allclose(gpt.blocks[0].ln_1(x), expected[1e-5][0], rtol=1e-4)
    np.testing.assert_allclose(gpt.ln_f(x), expected[1e-6][1], rtol=1e-4)
    older = models.build(
        dataclasses.replace(GPT, final_norm="layer", norm_epsilon=1e-6), V, nnx.Rngs(0)
    )
    np.testing.assert_allclose(older.blocks[0].ln_2(x), expected[1e-6][0], rtol=1e-4)
    np.testing.assert_allclose(older.ln_f(x), expected[1e-6][0], rtol=1e-4)
    llama = models.build(LLAMA, V, nnx.Rngs(0))
    np.testing.assert_allclose(llama.blocks[0].norm_1(x), expected[1e-5][1], rtol=1e-4)
    np.testing.assert_allclose(llama.norm_f(x), expected[1e-5][1], rtol=1e-4)


@pytest.mark.parametrize("config", [GPT, dataclasses.replace(GPT, qkv="separate"), LLAMA])
def test_operations_count_each_weight_that_multiplies(config):
    _, params = split(config)
    weights = sum(x.size for path, x in leaves(params).items() if path.endswith("kernel"))
    weights += V * config.d_model if config.tied else 0  # the head, which is the embedding then
    attention = config.n_layer * config.context * config.d_model
    assert training_flops_per_token(config, V) == 6 * (weights + attention)
