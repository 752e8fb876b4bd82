"""Kernels of attention: equal to the plain one, in less memory; which one runs where."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.trainer import models
from examples.trainer.models import attention_kernels
from examples.trainer.models.attention_kernels import (
    check_attention,
    choose,
    chunked_attention,
    describe,
    plain,
    splash,
)
from examples.trainer.models.layers import Layout
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding

GPT = ModelConfig(n_layer=1, n_head=2, d_model=16, d_ff=40, context=20)
LLAMA = dataclasses.replace(GPT, family="llama", tied=False)


def random(shape, dtype="float32", n=4):
    """Queries, keys, values, and a gradient of the result."""
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(n)]


def result_and_gradients(kernel, q, k, v, dout):
    """The result of a kernel, and the gradients of its operands, in float32."""

    @jax.jit
    def compute(q, k, v, dout):
        out, back = jax.vjp(kernel, q, k, v)
        return out, *back(dout)

    return [np.asarray(x, np.float32) for x in compute(q, k, v, dout)]


def exact(q, k, v, dout):
    """The same by the definition, in float64."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    t, scale = q.shape[1], q.shape[3] ** -0.5
    scores = np.einsum("bihk,bjhk->bhij", q, k) * scale
    scores[..., ~np.tri(t, dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bihk,bjhk->bhij", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return [
        np.einsum("bhij,bjhk->bihk", p, v),
        np.einsum("bhij,bjhk->bihk", ds, k),
        np.einsum("bhij,bihk->bjhk", ds, q),
        np.einsum("bhij,bihk->bjhk", p, dout),
    ]


# float32: sums of some ten products, and softmaxes that were scaled once for each block.
# bfloat16: weights and results are rounded to 8 bits, of values up to 4.
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("bfloat16", 4e-2)])
@pytest.mark.parametrize(("t", "block"), [(21, 8), (24, 8), (1, 8), (20, 256)])
def test_chunked_attention_is_exact(t, block, dtype, atol):
    arrays = random((2, t, 3, 8), dtype)
    kernel = functools.partial(chunked_attention, block=block)
    for one, expected in zip(result_and_gradients(kernel, *arrays), exact(*arrays), strict=True):
        np.testing.assert_allclose(one, expected, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("bfloat16", 4e-2)])
def test_splash_attention_is_exact(dtype, atol):
    arrays = random((1, 128, 1, 16), dtype)
    kernel = functools.partial(splash, interpret=True)
    for one, expected in zip(result_and_gradients(kernel, *arrays), exact(*arrays), strict=True):
        np.testing.assert_allclose(one, expected, atol=atol)


def test_memory_of_chunked_attention_does_not_grow_with_the_square_of_the_context():
    def temporary_bytes(kernel, t):
        rows = jax.ShapeDtypeStruct((1, t, 2, 16), jnp.float32)
        gradient = jax.grad(lambda q, k, v: kernel(q, k, v).sum(), argnums=(0, 1, 2))
        compiled = jax.jit(gradient).lower(rows, rows, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    blocks = functools.partial(chunked_attention, block=64)
    scores = 2 * 4 * 2048**2  # bytes, for two heads
    assert temporary_bytes(plain, 2048) > scores
    assert temporary_bytes(blocks, 2048) < scores / 10
    assert temporary_bytes(blocks, 4096) < 2.2 * temporary_bytes(blocks, 2048)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_kernels_give_one_model_the_same_losses(config):
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 50)

    def gradients(attention):
        changed = dataclasses.replace(config, attention=attention, scan=True, remat="full")
        graph, params = nnx.split(models.build(changed, 50, nnx.Rngs(0)))
        return jax.jit(
            jax.grad(lambda p: jax.nn.logsumexp(nnx.merge(graph, p)(tokens), axis=-1).mean())
        )(params)

    chunked, expected = (jax.tree.leaves(gradients(name)) for name in ("chunked", "plain"))
    for one, other in zip(chunked, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_heads_that_do_not_divide_are_computed_by_each_device():
    layout = Layout(sharding.make_mesh("data=2,tensor=4", jax.devices()))
    arrays = random((2, 12, 2, 8))

    def divided(q, k, v):
        return layout.divide(chunked_attention, ("batch", None, "heads", None), q, k, v)

    for one, expected in zip(result_and_gradients(divided, *arrays), exact(*arrays), strict=True):
        np.testing.assert_allclose(one, expected, atol=2e-6)


class Accelerator(Layout):
    """A mesh of devices that are not here."""

    platform = "gpu"
    is_here = False


class TPU(Accelerator):
    platform = "tpu"


@pytest.mark.parametrize(
    ("layout", "change", "kernel", "reason"),
    [
        (Layout(), {}, "chunked", ""),
        (Layout(), {"attention": "plain"}, "plain", ""),
        (Layout(), {"attention": "cudnn"}, "chunked", "cudnn is not for a cpu"),
        (Accelerator(), {}, "chunked", "cudnn: cuDNN "),  # not detected, or not found
        (TPU(), {}, "splash", ""),
        (TPU(), {"context": 200}, "chunked", "splash needs rows of a multiple of 128 tokens"),
        (TPU(), {"n_head": 4}, "chunked", "splash needs heads of a multiple of 64 numbers, not 32"),
        (TPU(), {"attention": "cudnn"}, "chunked", "cudnn is not for a tpu"),
    ],
)
def test_choice_of_a_kernel(layout, change, kernel, reason):
    config = ModelConfig(n_head=2, d_model=128, context=256, compute_dtype="bfloat16")
    config = dataclasses.replace(config, **change)
    found = choose(config, layout, config.context)
    assert found.kernel == kernel and found.reason.startswith(reason)
    assert describe(config, layout).startswith(f"{kernel} attention" + (" (" if reason else ""))
    if reason and config.attention != "auto":
        with pytest.raises(UserError, match=f"--model.attention {config.attention} cannot be used"):
            check_attention(config, layout)
    else:
        check_attention(config, layout)


def test_cudnn_that_does_not_compile_is_not_used(monkeypatch):
    def broken(q, k, v):
        raise jax.errors.JaxRuntimeError("INTERNAL: No valid engine configs\nfor this")

    monkeypatch.setattr(attention_kernels, "cudnn", broken)
    config = ModelConfig(context=257)  # asked for nowhere else, since choices are kept
    assert choose(config, Accelerator(), 257).reason == "cudnn: INTERNAL: No valid engine configs"
