"""Kernels of attention: equal to the definition, and which one runs on a device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from examples.trainer.models import sharding
from examples.trainer.models.blocks import choose, plain, splash
from examples.trainer.settings.run import ModelConfig


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
    scores = np.where(np.tri(t, dtype=bool)[None, None], scores, -np.inf)
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


KERNELS = {"plain": plain, "splash": functools.partial(splash, interpret=True)}


# bfloat16: weights and results are rounded to 8 bits, of values up to 4.
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 3e-6), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_exact(kernel, dtype, atol):
    arrays = random((1, 128, 1, 16), dtype)
    found = result_and_gradients(KERNELS[kernel], *arrays)
    for one, expected in zip(found, exact(*arrays), strict=True):
        np.testing.assert_allclose(one, expected, atol=atol)


def test_heads_that_do_not_divide_are_computed_by_each_device():
    mesh = sharding.make_mesh("data=2,tensor=4", jax.devices())
    arrays = jax.device_put(random((2, 12, 2, 8)), sharding.replicated(mesh))

    def divided(q, k, v):
        with sharding.on(mesh):
            return sharding.on_shards(plain, (sharding.BATCH, None, "tensor", None), q, k, v)

    for one, expected in zip(result_and_gradients(divided, *arrays), exact(*arrays), strict=True):
        np.testing.assert_allclose(one, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("platform", "change", "kernel"),
    [
        ("cpu", {}, "plain"),
        ("cpu", {"attention": "cudnn"}, "cudnn"),  # JAX says why it cannot run
        ("gpu", {}, "cudnn"),
        ("gpu", {"compute_dtype": "float32"}, "plain"),
        ("gpu", {"context": 200}, "plain"),
        ("tpu", {}, "splash"),
        ("tpu", {"context": 200}, "plain"),
        ("tpu", {"n_head": 4}, "plain"),
    ],
)
def test_choice_of_a_kernel(platform, change, kernel):
    config = ModelConfig(n_head=2, d_model=128, context=256, compute_dtype="bfloat16")
    config = dataclasses.replace(config, **change)
    assert choose(config, platform) == kernel
