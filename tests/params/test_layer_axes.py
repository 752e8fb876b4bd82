"""Stacked layers: read like one of them where an axis is stated, and asked for where none is."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from optax.contrib import MuonDimensionNumbers as Dims

import optax_muonplus as omp
from optax_muonplus._params.reader import reader_of
from optax_muonplus._params.resolve import resolve
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
    table = omp.describe(tree, rules=rules)
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
    assert " ?  " in omp.describe(params)
    table = omp.describe(params, layer_axes={"layers": 0})
    assert "8x8x3" in table and "16x8x3" in table and "?" not in table
    assert "attention: in, (heads head) (Flax, Keras); layers on axis 0" in table
    matrices = {path for path, spec in read(params, layer_axes={"layers": 0}).items() if spec}
    assert matrices == {path for path in read(params, layer_axes={".": 0}) if "kernel" in path}


def test_without_an_axis_stacked_attention_is_not_taken_for_heads():
    """(layers, in, out) has as many axes as (in, heads, head): the output kernel tells."""
    tree = nested_shapes(attn__query__kernel=(3, 16, 16), attn__out__kernel=(3, 16, 16))
    with pytest.raises(ValueError, match=r"(?s)No rule fits.*attn/query/kernel \(3, 16, 16\)"):
        omp.muon_dimension_numbers(tree)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer_axes": {"lyers": 0}}, "match no parameter: 'lyers'"),
        ({"layer_axes": {"layers": 6}}, "layer_axes of layers/.*: axis 6 is out of bounds"),
        (
            {"rules": [("wi/kernel", Dims(1, 2))], "layer_axes": {"layers": 0}},
            r"do not fit\. layers/mlp/wi/kernel: output_axis of .* axes of shape \(8, 16\)",
        ),
    ],
)
def test_axes_that_are_not_there_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        omp.muon_dimension_numbers(tree_with(0), **options)


NUMBERS = omp.MuonDimensionNumbers(-2, -1)
KERNELS = {f"layers__{x}": (3, 64, 64) for x in ("wq", "wo", "w1")}
VECTORS = {f"layers__{x}": (3, 64) for x in ("g1", "b1", "bq", "ls1", "b_in", "D", "of__weight")}
TABLES = {"embed__embedding": (100, 64), "lm_head__kernel": (64, 100)}
SCANNED = nested_shapes(**KERNELS, **VECTORS, **TABLES)


def groups(params, rules=(), layer_axes=None):
    leaves = resolve(params, reader_of(None, rules, layer_axes), strict=False).leaves
    return {leaf.name: leaf.label for leaf in leaves}


def asked(params, **options):
    """What the error says to pass, as arguments; it must say one thing only."""
    with pytest.raises(ValueError, match="No rule fits") as caught:
        omp.muonplus(0.1, **options).init(params)
    assert "rules=" not in str(caught.value)
    (line,) = [x for x in str(caught.value).splitlines() if x.startswith("layer_axes=")]
    return {"layer_axes": eval(line.removeprefix("layer_axes="))}


def test_what_the_error_says_makes_kernels_matrices_and_nothing_else():
    told = asked(SCANNED)
    assert told == {"layer_axes": {"^layers/": 0}}
    found = groups(SCANNED, **told)
    assert {name for name, group in found.items() if group == "muon"} == {
        "layers/wq",
        "layers/wo",
        "layers/w1",
    }
    omp.muonplus(0.1, **told).init(SCANNED)


def test_rules_for_the_kernels_leave_the_vectors_a_question():
    rules = [(r"layers/w\w$", NUMBERS)]
    found = groups(SCANNED, rules=rules)
    assert found["layers/wq"] == "muon"
    assert {found[x.replace("__", "/")] for x in VECTORS} == {"?"}
    assert "no rule: a vector of each of 3 layers?" in omp.describe(SCANNED, rules=rules)
    assert asked(SCANNED, rules=rules) == {"layer_axes": {"^layers/": 0}}
    # A rule of the user's own settles it.
    own = [*rules, ("layers/g1", omp.MuonDimensionNumbers(0, 1)), ("layers/", None)]
    found = groups(SCANNED, rules=own)
    assert found["layers/g1"] == "muon" and found["layers/b1"] == "adam"


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        (
            {"p__layers__a__w": (8, 3, 2, 4), "p__layers__g": (8, 3), "q__layers_w": (8, 8)},
            {"^p/layers/": 1},
        ),
        (
            {"e__layers__w": (3, 8, 8), "e__layers__g": (3, 8)}
            | {"d__layers__w": (2, 8, 8), "d__layers__g": (2, 8)},
            {"^d/layers/": 0, "^e/layers/": 0},
        ),
        ({"layers__moe__w": (3, 4, 8, 8), "layers__norm__scale": (3, 8)}, {"^layers/": 0}),
    ],
    ids=["axis 1", "two stacks", "norms that are known"],
)
def test_the_pattern_finds_the_stack_and_nothing_else(shapes, axes):
    assert asked(nested_shapes(**shapes)) == {"layer_axes": axes}


@pytest.mark.parametrize(
    "shapes",
    [
        {"block__wq": (64, 8, 16), "block__w1": (64, 256), "block__wo": (8, 16, 64)},
        {"block__wqkv": (64, 3, 64), "block__w1": (64, 256)},
        {"moe__w": (8, 64, 128), "moe__router": (64, 8)},
        {"layers__0__w": (8, 16, 4), "layers__0__g": (8, 8)},
    ],
    ids=["heads", "a part axis", "experts", "numbered"],
)
def test_what_is_no_stack_stays_a_matrix(shapes):
    params = nested_shapes(**shapes)
    two_axes = {x.replace("__", "/") for x, shape in shapes.items() if len(shape) == 2}
    assert {groups(params)[x] for x in two_axes} == {"muon"}
    with pytest.raises(ValueError, match=r"(?s)No rule fits.*rules=\["):
        omp.muonplus(0.1).init(params)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"layers__up__w1": (64, 256), "layers__down__w1": (256, 64)},
            r"several numbers of layers below 'layers': layers/down/w1 \(256, 64\), layers/up",
        ),
        (
            {"layers__up__kernel": (3, 4, 8), "layers__shared__kernel": (4, 8)},
            r"layers/shared/kernel \(4, 8\), layers/up/kernel \(3, 4, 8\)",
        ),
    ],
)
def test_layers_that_are_not_stacked_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        omp.muonplus(0.1, layer_axes={"layers": 0}).init(nested_shapes(**shapes))


def test_stacks_of_several_depths_may_share_a_pattern():
    params = nested_shapes(
        dense_layers__up__kernel=(2, 4, 8), moe_layers__up__kernel=(5, 4, 8), moe_layers__g=(5, 4)
    )
    omp.muonplus(0.1, layer_axes={"layers": 0}).init(params)
