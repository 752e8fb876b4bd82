"""Stacked layers, whose axis is stated, are read like one of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from optax.contrib import MuonDimensionNumbers as Dims

import optax_muonplus as omp
from tests.support.trees import by_path, nested_shapes

LAYERS = {
    "layers__attn__query__kernel": (8, 2, 4),
    "layers__attn__query__bias": (2, 4),
    "layers__attn__out__kernel": (2, 4, 8),
    "layers__mlp__wi__kernel": (8, 16),
    "layers__mlp__wi__bias": (16,),
    "layers__mlp__norm__scale": (8,),
    "layers__mlp__dt": (6,),
    "layers__moe__experts__up__kernel": (5, 8, 6),
    "layers__conv__kernel": (3, 3, 1, 8),
    "layers__qkv__kernel": (8, 12),
    "layers__depth": (),
}
REST = {"embed__embedding": (20, 8), "decoder_norm__scale": (8,), "head_of__kernel": (8, 12)}
QKV = ("qkv", omp.MatrixSpec(0, 1, split_sizes=(4, 4, 4)))


def tree_with(axis, count=3):
    stacked = {
        name: (*shape[:axis], count, *shape[axis:]) if len(shape) >= axis else shape
        for name, shape in LAYERS.items()
    }
    return nested_shapes(**stacked, **REST)


def read(tree, **options):
    """Dimension numbers by path."""
    is_leaf = lambda x: x is None or isinstance(x, Dims | omp.MatrixSpec)  # noqa: E731
    return by_path(omp.muon_dimension_numbers(tree, **options), is_leaf)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_unstacked_rules_are_applied(axis):
    tree = tree_with(axis)
    stacked = read(tree, rules=[QKV], layer_axes={"^layers/": axis})
    one = read(nested_shapes(**LAYERS, **REST), rules=[QKV])
    assert {path for path, spec in stacked.items() if spec} == {path for path in one if one[path]}
    for path, spec in one.items():
        if spec is None or not path.startswith("layers/"):
            assert stacked[path] == spec, path
            continue
        names = list("abcd"[: len(LAYERS[path.replace("/", "__")])])
        with_layers = [*names[:axis], "L", *names[axis:]]
        for side in ("reduction_axis", "output_axis"):
            axes = getattr(spec, side)
            expected = [names[a] for a in ((axes,) if isinstance(axes, int) else axes)]
            assert [with_layers[a] for a in getattr(stacked[path], side)] == expected, path
    assert stacked["layers/qkv/kernel"].split_sizes == (4, 4, 4)


def test_rules_of_the_user_do_not_catch_stacked_vectors():
    tree = tree_with(0)
    rule = ("layers/mlp", Dims(0, 1))
    found = read(tree, rules=[rule, QKV], layer_axes={"layers": 0})
    assert found["layers/mlp/wi/kernel"] == Dims((1,), (2,))
    for path in ("layers/mlp/norm/scale", "layers/mlp/wi/bias", "layers/mlp/dt"):
        assert found[path] is None, path
    # Its number of axes is that of one layer.
    by_ndim = read(tree, rules=[("wi", Dims(1, 0), 2)], layer_axes={"layers": 0})
    assert by_ndim["layers/mlp/wi/kernel"] == Dims((2,), (1,))
    # Where nobody says so, describe says what the rule took.
    tree = nested_shapes(layers__mlp__wi__kernel=(3, 8, 16), layers__mlp__norm__scale=(3, 8))
    rules = [("layers/mlp", Dims(-2, -1))]
    table = omp.describe(tree, functools.partial(omp.muon_dimension_numbers, rules=rules))
    assert "your rule 'layers/mlp', in place of: bias or scale" in table
    assert "your rule 'layers/mlp'\n" in table


def test_a_model_under_nn_scan():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.MultiHeadDotProductAttention(2, name="attn")(nn.LayerNorm()(x))
            return x + nn.Dense(8)(nn.relu(nn.Dense(16)(y))), None

    scanned = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=3)()
    x = jnp.ones((1, 4, 8))
    params = {"layers": jax.eval_shape(scanned.init, jax.random.key(0), x, None)["params"]}
    dims = functools.partial(omp.muon_dimension_numbers, layer_axes={"layers": 0})
    assert " ?  " in omp.describe(params)
    table = omp.describe(params, dims)
    assert "8x8x3" in table and "16x8x3" in table and "?" not in table
    assert "attention: in, (heads head) (Flax, Keras); layers on axis 0" in table
    matrices = {path for path, spec in read(params, layer_axes={"layers": 0}).items() if spec}
    assert matrices == {path for path in read(params, layer_axes={".": 0}) if "kernel" in path}


def test_without_an_axis_stacked_attention_is_not_taken_for_heads():
    """(layers, in, out) has as many axes as (in, heads, head): the output kernel tells."""
    tree = nested_shapes(attn__query__kernel=(3, 16, 16), attn__out__kernel=(3, 16, 16))
    with pytest.raises(ValueError, match=r"(?s)No rule says.*attn/query/kernel \(3, 16, 16\)"):
        omp.muon_dimension_numbers(tree)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer_axes": {"lyers": 0}}, r"match no parameter: 'lyers'"),
        ({"layer_axes": {"layers": 5}}, r"has no axis \(5,\), over which layers"),
        (
            {"rules": [("wi/kernel", Dims(1, 2))], "layer_axes": {"layers": 0}},
            r"layers/mlp/wi/kernel, without the axes of its layers: .*the shape that one layer has",
        ),
    ],
)
def test_axes_that_are_not_there_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        omp.muon_dimension_numbers(tree_with(0), **options)
