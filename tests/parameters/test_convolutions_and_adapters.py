"""Convolutions and LoRA, against the layers' own forward passes; frozen parameters cost nothing.

A gradient of one input is the product of a vector over output units and one over inputs: rows
normalized last have one norm then, and columns have not, so that exchanging the two fails.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_muonplus as omp
from tests.support.trees import nested_shapes, random_tree

KEY = jax.random.key(0)


def flax_patches():
    layer = nn.Conv(7, (4, 4), padding="VALID")
    x = jax.random.normal(KEY, (1, 4, 4, 3))
    return layer.init(KEY, x)["params"], lambda p: layer.apply({"params": p}, x), "kernel", 3


def flax_one_by_one():
    layer = nn.Conv(7, (1, 1))
    x = jax.random.normal(KEY, (1, 1, 1, 5))
    return layer.init(KEY, x)["params"], lambda p: layer.apply({"params": p}, x), "kernel", 3


def haiku_patches():
    layer = hk.without_apply_rng(hk.transform(lambda x: hk.Conv2D(7, 4, padding="VALID")(x)))
    x = jax.random.normal(KEY, (1, 4, 4, 3))
    params = layer.init(KEY, x)["conv2_d"]
    return params, lambda p: layer.apply({"conv2_d": p}, x), "w", 3


def equinox_patches():
    layer = eqx.nn.Conv2d(3, 7, 4, key=KEY)
    x = jax.random.normal(KEY, (3, 4, 4))
    arrays, static = eqx.partition(layer, eqx.is_array)
    params = {"weight": arrays.weight, "bias": arrays.bias}

    def forward(p):
        return eqx.combine(
            eqx.tree_at(lambda m: (m.weight, m.bias), arrays, (p["weight"], p["bias"])), static
        )(x)

    return params, forward, "weight", 0


@pytest.mark.parametrize(
    "owner, make",
    [
        ("embedding", flax_patches),
        ("Conv_0", flax_one_by_one),
        ("patch_embed", haiku_patches),
        ("patch_embed/proj", equinox_patches),
    ],
)
def test_rows_are_output_channels(owner, make):
    params, forward, name, output_axis = make()
    tx = omp.muonplus(1.0, norm="row", norm_eps=0.0, polar="svd", beta=0.0)

    @jax.jit
    def first_update(params):
        def loss(params):
            return (forward(params[owner]).ravel() * jnp.arange(1.0, 8)).sum()

        return tx.update(jax.grad(loss)(params), tx.init(params), params)[0]

    update = np.moveaxis(first_update({owner: params})[owner][name], output_axis, -1)
    columns, rows = update.reshape(-1, 7), update.reshape(-1, 7).T
    factor = np.sqrt(rows.shape[0] / rows.shape[1])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), factor, rtol=1e-4)
    sizes = np.linalg.norm(columns, axis=1)
    assert sizes.max() > 1.1 * sizes.min()


def test_depthwise_kernels_get_adamw_and_others_are_asked_for():
    x = jnp.ones((1, 8, 8, 6))
    depthwise = jax.eval_shape(nn.Conv(6, (3, 3), feature_group_count=6).init, KEY, x)["params"]
    assert omp.partition_labels({"Conv_0": depthwise})["Conv_0"]["kernel"] == "adam"
    model = eqx.nn.Conv2d(6, 6, 3, groups=6, key=KEY)
    labels = omp.partition_labels({"conv": eqx.filter(model, eqx.is_array)})
    assert labels["conv"].weight == "adam"
    with pytest.raises(ValueError, match=r"\('Conv_\\\\d\+/kernel', omp.MuonDimensionNumbers\("):
        omp.partition_labels(nested_shapes(Conv_0__kernel=(12, 3, 4, 8)))
    with pytest.raises(ValueError, match=r"\('conv/weight', omp.*\(\(1, 2, 3\), 0\)\)"):
        omp.partition_labels(nested_shapes(conv__weight=(8, 4, 3, 3)))


def test_lora_of_nnx():
    layer = nnx.LoRALinear(6, 8, lora_rank=2, rngs=nnx.Rngs(0))
    state = nnx.to_pure_dict(nnx.state(layer, nnx.LoRAParam))
    table = omp.describe(state)
    assert "2x6x1" in table and "LoRA: in, rank" in table
    assert "8x2x1" in table and "LoRA: rank, out" in table


FROZEN = {"up": {"kernel": (64, 128)}, "experts_of": {"w": (4, 8, 8)}, "bias": (128,)}
TRAINED = {"lora_a": (64, 4), "lora_b": (4, 128)}


@pytest.mark.parametrize("how", ["None", "masked", "partition"])
def test_frozen_parameters_cost_nothing(how):
    """No state, no operations, no rule: one of them has a layout that no rule knows."""
    trained = random_tree(TRAINED)
    params = {"base": random_tree(FROZEN), "adapter": trained}
    tx = omp.muonplus(0.1)
    alone = tx.init(trained)
    if how == "None":
        params = {"base": None, "adapter": trained}
    elif how == "masked":
        tx = optax.masked(tx, {"base": False, "adapter": True})
    else:
        tx = optax.partition(
            {"train": tx, "freeze": optax.set_to_zero()}, {"base": "freeze", "adapter": "train"}
        )
    state = tx.init(params)
    sizes = [sum(x.size for x in jax.tree.leaves(s)) for s in (state, alone)]
    assert sizes[0] == sizes[1]
    flops = [
        jax.jit(t.update).lower(p, s, p).compile().cost_analysis()["flops"]
        for t, p, s in [(tx, params, state), (omp.muonplus(0.1), trained, alone)]
    ]
    assert flops[0] == flops[1]
