"""The norm of gradients and their clipping: in float32, also for gradients in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.trainer.training import sharding, transformations

COUNT = 100_000


def small_gradients(dtype):
    """2 x 1e5 elements of 1e-3, whose squares are far smaller than their sum."""
    return {
        "a": jnp.full((COUNT,), 1e-3, dtype),
        "b": jnp.full((COUNT // 8, 8), 1e-3, dtype),
    }


def norm_in_float64(tree):
    """The oracle."""
    return np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_norm_is_that_of_float64(dtype):
    grads = small_gradients(dtype)
    found = jax.jit(transformations.global_norm)(grads)
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx(norm_in_float64(grads), rel=1e-5)
    if dtype == "bfloat16":  # what this is in place of
        assert abs(float(optax.tree.norm(grads)) / norm_in_float64(grads) - 1) > 1e-4


def test_norm_of_shards_is_that_of_the_whole():
    mesh = sharding.make_mesh("data=2,fsdp=4", jax.devices())
    grads = small_gradients("bfloat16")
    placed = {
        "a": jax.device_put(grads["a"], NamedSharding(mesh, P("fsdp"))),
        "b": jax.device_put(grads["b"], NamedSharding(mesh, P("fsdp", "data"))),
    }
    found = jax.jit(transformations.global_norm)(placed)
    assert float(found) == pytest.approx(norm_in_float64(grads), rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("largest", [0.1, 10.0])
def test_clipping_is_that_of_float64(dtype, largest):
    values = np.random.default_rng(0).standard_normal((300, 50)) / 100
    grads = {"a": jnp.asarray(values, dtype), "b": small_gradients(dtype)["a"]}
    found, _ = jax.jit(transformations.clip_by_global_norm(largest).update)(
        grads, optax.EmptyState()
    )
    factor = min(1.0, largest / norm_in_float64(grads))
    # Rounded once: half of the last of 8 bits. In float32, divided and multiplied.
    tolerance = 2.0**-8 if dtype == "bfloat16" else 3e-7
    for name, x in grads.items():
        assert found[name].dtype == x.dtype
        exact = np.asarray(x, np.float64) * factor
        np.testing.assert_allclose(np.asarray(found[name], np.float64), exact, rtol=tolerance)
    if dtype == "float32":
        theirs, _ = jax.jit(optax.clip_by_global_norm(largest).update)(grads, optax.EmptyState())
        jax.tree.map(np.testing.assert_array_equal, found, theirs)


@pytest.mark.cpu_program
def test_clipping_stores_no_copy_in_float32():
    grads = jax.eval_shape(lambda: small_gradients("bfloat16"))
    step = jax.jit(transformations.clip_by_global_norm(0.1).update, donate_argnums=0)
    memory = step.lower(grads, optax.EmptyState()).compile().memory_analysis()
    assert memory.temp_size_in_bytes < COUNT  # bytes; a copy of one array has 4 for an element
