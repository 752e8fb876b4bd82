"""Fewer heads of keys and values than of queries: numbers, the KV cache, meshes, and sentences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.trainer.models.attention import empty_kv_cache
from examples.trainer.settings import validation
from examples.trainer.settings.model import ModelConfig, training_flops_per_token
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.step import make_forward, make_init_params

V, T = 11, 8
GROUPED = ModelConfig(
    family="llama", n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=24, context=T, tied=False
)
TOKENS = jax.random.randint(jax.random.key(1), (4, T), 0, V)


def params_of(config):
    grown = make_init_params(config, V)(0)
    return jax.tree.map(lambda x: x * (10 if x.ndim > 1 else 1), grown)  # so that heads differ


def logits(config, params, devices=1, mesh=""):
    made = sharding.make_mesh(mesh, jax.devices()[:devices])
    placed = jax.device_put(params, sharding.of_params(jax.eval_shape(lambda: params), made))
    return jax.jit(make_forward(config, V, made))(placed, TOKENS, None, 0)[0]


def each_served_alone(params):
    """The parameters of a model whose keys and values are repeated for each head of queries."""

    def repeated(path, x):
        if path[-2].key not in ("key", "value"):
            return x
        return np.repeat(np.asarray(x).reshape(16, 2, 4), 2, axis=1).reshape(16, 16)

    return jax.tree.map_with_path(repeated, params)


def test_a_head_of_keys_and_values_serves_those_queries_that_follow_each_other():
    params = params_of(GROUPED)
    assert params["blocks"][0]["attn"]["key"]["kernel"].shape == (16, 8)
    alone = dataclasses.replace(GROUPED, n_kv_head=None)
    expected = logits(alone, each_served_alone(params))
    np.testing.assert_allclose(logits(GROUPED, params), expected, atol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_the_cache_is_as_small_and_gives_the_same(scan):
    config = dataclasses.replace(GROUPED, scan=scan)
    params, one_device = params_of(config), sharding.make_mesh("", jax.devices()[:1])
    forward = jax.jit(make_forward(config, V, one_device))
    cache = empty_kv_cache(config, rows=4)
    assert {x.shape[-2:] for x in jax.tree.leaves(cache)} == {(2, 4)}
    one_by_one = []
    for i in range(T):
        now, cache = forward(params, TOKENS[:, i : i + 1], cache, i)
        one_by_one.append(now)
    expected = logits(config, params)
    np.testing.assert_allclose(jnp.concatenate(one_by_one, axis=1), expected, atol=1e-5)


@pytest.mark.several_devices
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4"])
def test_all_meshes_give_the_same(mesh):
    params = params_of(GROUPED)
    expected = logits(GROUPED, params)
    np.testing.assert_allclose(logits(GROUPED, params, 8, mesh), expected, atol=1e-5)


def test_fewer_keys_and_values_are_fewer_operations():
    alone = dataclasses.replace(GROUPED, n_kv_head=None)
    fewer = training_flops_per_token(alone, V) - training_flops_per_token(GROUPED, V)
    assert fewer == 6 * 2 * 2 * (16 * 8)  # two layers, keys and values, 8 columns of 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_kv_head": 3}, "--model.n-kv-head 3 does not divide --model.n-head 4"),
        ({"family": "gpt"}, "only llama with --model.qkv separate"),
        ({"qkv": "fused"}, "only llama with --model.qkv separate"),
    ],
)
def test_impossible_groups_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        validation.check(dataclasses.replace(GROUPED, **change))
