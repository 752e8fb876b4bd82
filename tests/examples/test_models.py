"""What each model computes: scan and list, causality, rotary positions, norms, types."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.trainer import models
from examples.trainer.models import attention, layers
from examples.trainer.models.language_model import MLP
from examples.trainer.models.layers import ONE_DEVICE
from examples.trainer.settings import validation
from examples.trainer.settings.model import ModelConfig, hidden_width, training_flops_per_token
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training.loss import next_token_loss
from tests.support.model_trees import leaves, stacked

GPT = ModelConfig(n_layer=3, n_head=2, d_model=16, d_ff=40, context=12)

LLAMA = dataclasses.replace(GPT, family="llama", tied=False)

OLDER_GPT = dataclasses.replace(
    GPT, qkv="separate", final_norm="layer", depth_scaled_init=False, norm_epsilon=1e-6
)

FAMILIES = {"gpt": GPT, "older gpt": OLDER_GPT, "llama": LLAMA}

V = 50

TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, V)


@functools.cache
def split(config):
    """The model as a function of parameters and tokens, and its first parameters."""
    graph, state = nnx.split(models.build(config, V, nnx.Rngs(0)))
    apply = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    return apply, nnx.to_pure_dict(state)


@pytest.mark.parametrize(
    ("family", "remats"),
    [("gpt", ["none"]), ("older gpt", ["none"]), ("llama", ["none", "full", "attention"])],
)
def test_scan_and_list_give_the_same(family, remats):
    apply, params = split(FAMILIES[family])

    def loss(apply, params):
        return next_token_loss(apply(params, TOKENS), TOKENS)

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


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_position_sees_a_later_one(family, scan):
    apply, params = split(dataclasses.replace(FAMILIES[family], scan=scan))
    changed = TOKENS.at[:, 7].set((TOKENS[:, 7] + 1) % V)
    before, after = apply(params, TOKENS), apply(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7:] - after[:, 7:]).max(axis=(0, 2)).min() > 1e-6


def test_rotation_depends_on_the_difference_of_positions():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    turns = attention.rotation_angles(jnp.arange(30), 8, 1e4)

    def product(i, j):
        at_i, at_j = (attention.rotate(x, turns[n][None]) for x, n in ((q, i), (k, j)))
        return float((at_i * at_j).sum())

    assert product(3, 1) == pytest.approx(product(20, 18), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-2)
    assert product(5, 5) == pytest.approx(float((q * k).sum()), abs=1e-5)


def test_rotation_by_hand():
    # K = 4: the pairs (0, 2) and (1, 3) turn by t and t / 100 radians at position t.
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    turned = attention.rotate(x, attention.rotation_angles(jnp.arange(4), 4, 1e4)[3][None])[0, 0, 0]
    expected = [np.cos(3), -2 * np.sin(0.03), np.sin(3), 2 * np.cos(0.03)]
    np.testing.assert_allclose(turned, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 2])
def test_a_product_rotates_as_halves_do_and_so_does_its_gradient(dtype, group):
    """On TPUs. Each sum has one term: only the order of a rounding may differ, in the last bit."""
    x, g = jax.random.normal(jax.random.key(0), (2, 2, 5, 4, 8), dtype)
    turns = attention.rotation_angles(jnp.arange(5), 8, 1e4)
    found, expected = (
        jax.vjp(rotation, x)
        for rotation in (
            lambda x: attention.rotate_by_product(x, turns, group),
            lambda x: attention.rotate(x, turns),
        )
    )
    for one, other in ((found[0], expected[0]), (found[1](g)[0], expected[1](g)[0])):
        assert one.dtype == other.dtype == dtype
        tolerance = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(*(np.float64(y) for y in (one, other)), tolerance, tolerance)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_rms_norm(dtype, rtol):
    config = dataclasses.replace(LLAMA, d_model=6, compute_dtype=dtype)
    layer = layers.norm(nnx.RMSNorm, config, nnx.Rngs(0))
    layer.scale[...] = jnp.arange(1.0, 7.0)
    x = jax.random.normal(jax.random.key(0), (3, 6))
    expected = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-5) * np.arange(1, 7)[None]
    np.testing.assert_allclose(np.asarray(layer(x), np.float32), expected, rtol=rtol)
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("config", [LLAMA, dataclasses.replace(GPT, mlp="swiglu")])
def test_swiglu(config):
    mlp = MLP(config, ONE_DEVICE, nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(0), (1, 2, 16)), np.float64)
    gate, up, down = (np.asarray(m.kernel[...], np.float64) for m in (mlp.gate, mlp.up, mlp.down))
    gated = x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), gated @ down, atol=1e-7)


def test_gelu_and_its_width_for_either_family():
    gpt, llama = (dataclasses.replace(x, d_ff=None) for x in (GPT, LLAMA))
    for config in (gpt, dataclasses.replace(llama, mlp="gelu")):
        mlp = MLP(config, ONE_DEVICE, nnx.Rngs(0))
        assert not mlp.is_gated and mlp.up.kernel[...].shape == (16, 64)
        x = jax.random.normal(jax.random.key(0), (1, 2, 16))
        expected = jax.nn.gelu(x @ mlp.up.kernel[...]) @ mlp.down.kernel[...]
        np.testing.assert_allclose(mlp(x), expected, atol=1e-7)
        assert mlp.up.use_bias == (config.family == "gpt")
    gated = dataclasses.replace(gpt, mlp="swiglu")
    counts = [3 * 16 * hidden_width(gated), 2 * 16 * hidden_width(gpt)]
    assert counts[0] == pytest.approx(counts[1], rel=0.05)
    by_token = [training_flops_per_token(config, 100) for config in (gated, gpt)]
    assert by_token[0] == pytest.approx(by_token[1], rel=0.05)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_keeps_float32_parameters(family, scan):
    config = dataclasses.replace(FAMILIES[family], scan=scan, compute_dtype="bfloat16")
    apply, params = split(config)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert "bf16[" in str(jax.make_jaxpr(apply)(params, TOKENS))
    exact, _ = split(dataclasses.replace(config, compute_dtype="float32"))
    logits = apply(params, TOKENS)
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa, of logits near 0.1.
    np.testing.assert_allclose(logits, exact(params, TOKENS), atol=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_head": 3}, "cannot be cut into 3 heads"),
        ({"family": "llama", "n_head": 16}, "gives 1 numbers a head"),
        ({"d_ff": 0}, "--model.d-ff is 0"),
        ({"norm_epsilon": 0.0}, "--model.norm-epsilon is 0.0: it should be greater than 0"),
        ({"family": "llama", "final_norm": "layer"}, "all norms of llama are RMSNorm"),
    ],
)
def test_impossible_shapes_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        validation.check(RunConfig(model=dataclasses.replace(GPT, **change)))
