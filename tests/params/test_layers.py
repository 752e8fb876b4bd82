"""Layers of each framework, convolutions too: rows are output units by their own forward passes."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from optax_muonplus._leaves.paths import flatten_tree
from tests.support.rows import assert_rows_are_outputs, row_optimizer

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (1, 6))  # one position, so that attention is the projection of its value


def linen(layer, *inputs):
    params = layer.init(KEY, *inputs)
    return params, lambda p: layer.apply(p, *inputs)


def of_nnx(layer, *inputs):
    graph, params = nnx.split(layer)
    return params, lambda p: nnx.merge(graph, p)(*inputs)


def equinox(layer, forward):
    params, static = eqx.partition(layer, eqx.is_array)
    return params, lambda p: forward(eqx.combine(p, static))


def haiku(make, x):
    layer = hk.without_apply_rng(hk.transform(lambda x: make()(x)))
    return layer.init(KEY, x), lambda p: layer.apply(p, x)


def window(*shape):
    """Inputs of one window, so that a convolution has one output position."""
    return jax.random.normal(KEY, shape)


def flax_convolution(name, *sides):
    """A convolution of one window, below a layer of a name."""
    params, forward = linen(nn.Conv(7, sides, padding="VALID"), window(1, *sides, 6))
    return {name: params["params"]}, lambda p: forward({"params": p[name]})


# By case: parameters and forward pass, and by path the axes of a parameter that are inputs.
CASES = {
    "Linen Dense": (lambda: linen(nn.Dense(10), X), {"params/kernel": (0,)}),
    "Linen attention": (
        lambda: linen(nn.MultiHeadDotProductAttention(num_heads=3, out_features=10), X),
        {"params/value/kernel": (0,), "params/out/kernel": (0, 1)},
    ),
    "NNX Linear": (lambda: of_nnx(nnx.Linear(6, 10, rngs=nnx.Rngs(0)), X), {"kernel": (0,)}),
    "NNX attention": (
        lambda: of_nnx(
            nnx.MultiHeadAttention(3, 6, out_features=10, decode=False, rngs=nnx.Rngs(0)), X
        ),
        {"value/kernel": (0,), "out/kernel": (0, 1)},
    ),
    "Equinox Linear": (
        lambda: equinox(eqx.nn.Linear(6, 10, key=KEY), lambda layer: layer(X[0])),
        {"weight": (1,)},
    ),
    "Equinox attention": (
        lambda: equinox(
            {"attention": eqx.nn.MultiheadAttention(3, 6, output_size=10, key=KEY)},
            lambda block: block["attention"](X, X, X),
        ),
        {"attention/value_proj/weight": (1,), "attention/output_proj/weight": (1,)},
    ),
    "Haiku Linear": (lambda: haiku(lambda: hk.Linear(10, name="up"), X), {"up/w": (0,)}),
    "Haiku patches": (
        lambda: haiku(lambda: hk.Conv2D(7, 4, padding="VALID", name="stem"), window(1, 4, 4, 3)),
        {"stem/w": (0, 1, 2)},
    ),
    "Equinox patches": (
        lambda: equinox(
            {"patch_embed": {"proj": eqx.nn.Conv2d(3, 7, 4, key=KEY)}},
            lambda model: model["patch_embed"]["proj"](window(3, 4, 4)),
        ),
        {"patch_embed/proj/weight": (1, 2, 3)},
    ),
    **{
        f"Equinox convolution {sides}": (
            lambda sides=sides: equinox(
                [eqx.nn.Conv(len(sides), 3, 7, sides, key=KEY)],
                lambda model: model[0](window(3, *sides)),
            ),
            {"0/weight": tuple(range(1, len(sides) + 2))},
        )
        for sides in [(1,), (9,), (3, 3)]
    },
    "Flax patches": (lambda: flax_convolution("embedding", 4, 4), {"embedding/kernel": (0, 1, 2)}),
    **{
        f"Flax convolution {sides}": (
            lambda sides=sides: flax_convolution("Conv_0", *sides),
            {"Conv_0/kernel": tuple(range(len(sides) + 1))},
        )
        for sides in [(1, 1), (5,), (3, 3), (3, 3, 3)]
    },
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_output_units(case):
    make, inputs = CASES[case]
    params, forward = make()

    def loss(params):
        y = forward(params).ravel()
        return (y * jnp.arange(1.0, y.size + 1)).sum()

    tx = row_optimizer()
    update = jax.jit(lambda params: tx.update(jax.grad(loss)(params), tx.init(params), params)[0])
    paths, leaves, _ = flatten_tree(update(params))
    found = dict(zip(map("/".join, paths), leaves, strict=True))
    for path, axes in inputs.items():
        x = found[path] if path in found else found[f"{path}/value"]
        outputs = [axis for axis in range(x.ndim) if axis not in axes]
        assert_rows_are_outputs(x, range(x.ndim), axes, outputs)
