"""Heads as matrices of their own, in every layout, against NumPy and each layer's forward pass.

A layer is a function from its kernel and an input to what each head gives. Its gradient comes from
that function, and so does the check: the layer with the update as its kernel must map an input x to
U x for each head, where U is computed head by head in float64. Kernels of two axes are square, so
that shapes say nothing: exchanging rows and columns, or heads and what is in them, fails.
"""

import ast
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from tests.support.reference import muonplus_step
from tests.support.trees import by_path, nested_shapes

HEADS, SIZE = 3, 4
WIDTH = HEADS * SIZE
TOKENS = 6  # more than a head has outputs: its gradient has full rank


def heads(x):
    """``(heads, size)`` of heads side by side."""
    return x.reshape(-1, SIZE)


# Path, shape, and the layer as a function of its kernel and an input (WIDTH,).
TO_HEADS = {
    "flax/query/kernel": ((WIDTH, HEADS, SIZE), lambda w, x: jnp.einsum("i,ihk->hk", x, w)),
    "flax/key/kernel": ((WIDTH, 1, SIZE), lambda w, x: jnp.einsum("i,ihk->hk", x, w)),
    "flat/query/kernel": ((WIDTH, WIDTH), lambda w, x: heads(x @ w)),
    "flat/value/kernel": ((WIDTH, 2 * SIZE), lambda w, x: heads(x @ w)),  # grouped queries
    "torch/q_proj/weight": ((WIDTH, WIDTH), lambda w, x: heads(w @ x)),
    "torch/kv_b_proj/weight": ((2 * SIZE, WIDTH), lambda w, x: heads(w @ x)),
    "gemma/q_einsum/w": ((HEADS, WIDTH, SIZE), lambda w, x: jnp.einsum("i,hik->hk", x, w)),
    "gemma/kv_einsum/w": (
        (2, HEADS, WIDTH, SIZE),
        lambda w, x: jnp.einsum("i,chik->chk", x, w).reshape(-1, SIZE),
    ),
    # Two key and two value heads behind three query heads; and q, k, v of one head after the other.
    "fused/qkv/kernel": ((WIDTH, 7 * SIZE), lambda w, x: heads(x @ w)),
    "interleaved/c_attn/kernel": (
        (WIDTH, 3 * WIDTH),
        lambda w, x: jnp.einsum("i,ihck->hck", x, w.reshape(WIDTH, HEADS, 3, SIZE)),
    ),
    "torch2/in_proj_weight": ((3 * WIDTH, WIDTH), lambda w, x: heads(w @ x)),
    "plain/wq": ((WIDTH, WIDTH), lambda w, x: heads(x @ w)),
    "layers/query/kernel": ((2, WIDTH, WIDTH), lambda w, x: heads(jnp.einsum("i,lio->lo", x, w))),
    "maxtext/query/kernel": (
        (WIDTH, 2, HEADS, SIZE),
        lambda w, x: jnp.einsum("i,ilhk->lhk", x, w),
    ),
    "fused_axes/qkv/kernel": (
        (WIDTH, 3, HEADS, SIZE),
        lambda w, x: jnp.einsum("i,ichk->chk", x, w),
    ),
}
RULES = [("fused_axes", omp.MuonDimensionNumbers(0, (1, 2, 3)))]
LAYERS = {"^layers": 0, "^maxtext": 1}
PER_HEAD = omp.per_head(SIZE, rules=RULES, layer_axes=LAYERS)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def inputs(path):
    """Inputs of tokens, and the gradient of a loss by what each head gives for them."""
    layer_shape, layer = TO_HEADS[path]
    x = numbers(1, TOKENS, WIDTH)
    given = jax.eval_shape(layer, jnp.zeros(layer_shape), x[0]).shape
    return x, numbers(2, TOKENS, *given)


def gradient(path, shape, layer):
    x, g = inputs(path)
    loss = lambda w: sum(jnp.vdot(a, layer(w, b)) for a, b in zip(g, x, strict=True))  # noqa: E731
    return jax.grad(loss)(jnp.zeros(shape))


@functools.cache
def updates():
    """Updates of all layers by path, with the exact polar factor."""
    flat = {path: gradient(path, *layer) for path, layer in TO_HEADS.items()}
    shapes = nested_shapes(**{path.replace("/", "__"): x.shape for path, x in flat.items()})
    grads = jax.tree.structure(shapes).unflatten([flat[path] for path in by_path(shapes)])
    tx = omp.muonplus(1.0, beta=0.0, polar="svd", muon_weight_dimension_numbers=PER_HEAD)
    return by_path(jax.jit(tx.update)(grads, tx.init(grads))[0])


def step_of(g):
    """By NumPy, in float64, of the gradient (out, in) of one head."""
    zeros = np.zeros(g.shape)
    return muonplus_step(zeros, zeros, g, 1, beta=0.0, table="svd")[0]


@pytest.mark.parametrize("path", TO_HEADS)
def test_each_head_of_queries_keys_and_values_is_a_matrix(path):
    x, g = inputs(path)
    g = g.reshape(TOKENS, -1, SIZE).astype(np.float64)
    found = jax.vmap(functools.partial(TO_HEADS[path][1], updates()[path]))(x)
    for head in range(g.shape[1]):
        step = step_of(g[:, head].T @ x)  # (size, width)
        np.testing.assert_allclose(
            np.reshape(found, g.shape)[:, head], x @ step.T, atol=2e-5, err_msg=str(head)
        )


def test_output_projections_and_other_matrices_stay_whole():
    tree = nested_shapes(
        **{f"h__{i}__attn__{name}__kernel": (12, 12) for i in range(2) for name in ("q", "k", "o")},
        h__0__attn__q__bias=(12,),
        h__0__mlp__wo__kernel=(12, 12),
        h__0__rwkv__key__kernel=(12, 12),  # no queries beside it
        embed__embedding=(50, 12),
    )
    found = omp.muon_dimension_numbers(tree)
    cut = omp.MatrixSpec((0,), (1,), (4, 4, 4), 1)
    for i in "01":
        found["h"][i]["attn"]["q"]["kernel"] = found["h"][i]["attn"]["k"]["kernel"] = cut
    assert omp.per_head(4)(tree) == found
    table = omp.describe(tree, omp.per_head(4))
    assert "h/{0..1}/attn/q/kernel  12x12  muon   4x12x3" in table
    assert "2      kernel: in, out (Flax, Keras); per head\n" in table


def test_the_users_rules_come_first():
    tree = nested_shapes(a__q__kernel=(12, 12), b__q__kernel=(12, 12), c__qkv__kernel=(12, 20))
    split = omp.MatrixSpec(0, 1, split_sizes=(8, 8, 4))
    found = omp.per_head(4, rules=[("^a", None), ("qkv", split)])(tree)
    assert found["a"]["q"]["kernel"] is None
    assert found["b"]["q"]["kernel"].split_sizes == (4,) * 3
    assert found["c"]["qkv"]["kernel"].split_sizes == (4,) * 5


def test_a_mapping_chooses_parameters_of_any_name_and_their_sizes():
    tree = nested_shapes(a__q_b_proj__kernel=(12, 18), a__kv_b_proj__kernel=(12, 16), x__w=(12, 12))
    found = omp.per_head({"q_b": 6, "kv_b": 4, "x/": 3})(tree)
    sizes = found["a"]["q_b_proj"], found["a"]["kv_b_proj"], found["x"]
    assert [s.split_sizes[0] for x in sizes for s in x.values()] == [6, 4, 3]
    assert omp.per_head({"q_b": 6})(tree)["x"]["w"] == omp.MuonDimensionNumbers(0, 1)


ATTENTION = nested_shapes(attn__q__kernel=(12, 12), attn__o__kernel=(12, 12))
QKV, SPLIT = nested_shapes(attn__qkv=(12, 14)), ("qkv", omp.MatrixSpec(split_sizes=(8, 6)))


@pytest.mark.parametrize(
    ("tree", "head_size", "options", "message"),
    [
        (ATTENTION, None, {}, r"attn/q/kernel \(12, 12\): heads lie side by side among 12 outputs"),
        (
            ATTENTION,
            5,
            {},
            r"attn/q/kernel \(12, 12\): .* which head_size 5 does not divide",
        ),
        (
            nested_shapes(**{f"h__{i}__query__kernel": (12, 3, 4) for i in range(3)}),
            3,
            {},
            r"h/\{0..2\}/query/kernel \(12, 3, 4\): a head has 4 outputs by its shape",
        ),
        (nested_shapes(mlp__up__kernel=(4, 4)), 2, {}, "no layer has the name of a query.*mlp/up"),
        (nested_shapes(attn__o__kernel=(4, 4)), 2, {}, "no layer has the name of a query"),
        (ATTENTION, {"attn/q": 4, "qq": 4}, {}, "no matrix matches 'qq' among attn/o"),
        (
            ATTENTION,
            4,
            {"rules": [("q/", omp.MatrixSpec(0, 1, split_sizes=(6, 6), split_axis=0))]},
            "head_size 4 does not divide",
        ),
        (
            QKV,
            4,
            {"rules": [SPLIT]},
            r"attn/qkv .* 8 \+ 6 outputs, which head_size 4 does not",
        ),
        (
            nested_shapes(layers__query__kernel=(2, 12, 12)),
            4,
            {},
            "a head has 12 outputs by its shape",
        ),
        (nested_shapes(layers__qkv__kernel=(2, 12, 12)), 4, {}, "(?s)No rule fits.*layer_axes"),
    ],
)
def test_what_cannot_be_cut_is_refused(tree, head_size, options, message):
    with pytest.raises(ValueError, match=message):
        omp.per_head(head_size, **options)(tree)


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("blocks/0/attn/q_proj/kernel", ("blocks/0/attn", "query")),
        ("c_attn/w", ("", "query, key, value")),
        ("h/1/kv_proj/weight", ("h/1", "key, value")),
        ("mla/wq_b/kernel", ("mla", "latent query")),
        ("mla/kv_b_proj", ("mla", "latent key, value")),
        ("attn/out/kernel", ("attn", "output")),
        ("attn/q_norm/kernel", None),
        ("mlp/up/kernel", None),
    ],
)
def test_layers_of_attention_are_known_by_name(path, layer):
    assert omp.transforms.attention_layer(path) == layer


def test_names_of_attention_layers_stand_in_one_file():
    """Other files take them from it; MaxText's and Gemma's own names are in tables of rules."""
    package = pathlib.Path(omp.__file__).parent
    names = re.compile(r"\[qkv\]|query_key_value|quer\(|\(q\|query\)|wkv|w_\?u")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if "\n" not in node.value and names.search(node.value)
    }
    assert found == {"_params/attention.py", "_params/table.py"}
