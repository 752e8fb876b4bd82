"""Views of parameters as matrices, rules by path, labels, the table, and their errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from optax.contrib import MuonDimensionNumbers as Dims

import optax_muonplus as omp
from optax_muonplus._parameters.dimension_numbers import matrix_view

# name: shape, dimension numbers, and einsum from the parameter to (batch, out, in) with its sizes.
LAYOUTS = {
    "flax kernel": ((4, 6), Dims(0, 1), "io->oi", [(1, 6, 4)]),
    "equinox weight": ((6, 4), Dims(1, 0), "oi->oi", [(1, 6, 4)]),
    "conv HWIO": ((3, 2, 4, 5), Dims((0, 1, 2), 3), "hwio->ohwi", [(1, 5, 24)]),
    "DenseGeneral query": ((4, 2, 3), Dims(0, (1, 2)), "inh->nhi", [(1, 6, 4)]),
    "DenseGeneral out": ((2, 3, 4), Dims((0, 1), 2), "nho->onh", [(1, 4, 6)]),
    "query, one matrix a head": ((4, 2, 3), Dims(0, 2), "inh->nhi", [(2, 3, 4)]),
    "Gemma q einsum": ((2, 4, 3), Dims(1, (0, 2)), "nih->nhi", [(1, 6, 4)]),
    "Gemma kv einsum": ((2, 1, 4, 3), Dims(2, (1, 3)), "bkih->bkhi", [(2, 3, 4)]),
    "scanned layers": ((3, 4, 6), Dims(-2, -1), "lio->loi", [(3, 6, 4)]),
    "scan on axis 1": ((4, 3, 6), Dims(0, 2), "ilo->loi", [(3, 6, 4)]),
    "experts under scan": ((2, 3, 4, 5), Dims(2, 3), "leio->leoi", [(6, 5, 4)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_view_is_the_einsum_and_comes_back(name):
    shape, dims, einsum, blocks = LAYOUTS[name]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    view = matrix_view(shape, dims)
    (stored,) = view.to_matrices(jnp.asarray(x))
    matrices = np.swapaxes(stored, 1, 2) if view.transposed else stored
    assert view.block_shapes() == blocks == [matrices.shape]
    np.testing.assert_array_equal(matrices, np.einsum(einsum, x).reshape(blocks[0]))
    np.testing.assert_array_equal(view.from_matrices([stored]), x)


@pytest.mark.parametrize(
    "shape, spec, sizes",
    [
        ((4, 9), omp.MatrixSpec(split_sizes=(3, 2, 4)), [(1, 3, 4), (1, 2, 4), (1, 4, 4)]),
        ((9, 4), omp.MatrixSpec(split_sizes=(6, 3), split_axis=0), [(1, 4, 6), (1, 4, 3)]),
        ((2, 4, 6), omp.MatrixSpec(-2, -1, (2, 4)), [(2, 2, 4), (2, 4, 4)]),
        ((4, 2, 6), omp.MatrixSpec(0, (1, 2), (3, 3), split_axis=-1), [(1, 6, 4), (1, 6, 4)]),
    ],
)
def test_split_view_cuts_blocks_and_comes_back(shape, spec, sizes):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    view = matrix_view(shape, spec)
    stored = view.to_matrices(jnp.asarray(x))
    assert view.transposed
    assert view.block_shapes() == sizes == [np.swapaxes(m, 1, 2).shape for m in stored]
    np.testing.assert_array_equal(view.from_matrices(stored), x)


@pytest.mark.parametrize(
    "shape, spec, message",
    [
        ((5,), Dims(), r"shape \(5,\) is not a matrix.*give None"),
        ((5, 0), Dims(), "empty axis"),
        ((3, 4), Dims(0, 0), "overlap"),
        ((3, 4), Dims((0, 1), 1), "overlap"),
        ((3, 4), Dims(0, 2), "output_axis of .* must name one or more of the axes"),
        ((3, 4), Dims((), 1), "reduction_axis of .* must name one or more"),
        ((3, 4, 5), Dims((0, -3), 1), "names an axis of shape .* twice"),
        ((3, 4), omp.MatrixSpec(split_sizes=(1, 2)), r"add up to 4.*they add up to 3"),
        ((3, 4), omp.MatrixSpec(split_sizes=(4, 0)), "must be positive"),
        ((3, 4, 5), omp.MatrixSpec(0, (1, 2), (2, 3)), "several output axes"),
        ((3, 4, 5), omp.MatrixSpec(1, 2, (1, 2), split_axis=0), "must be one of the reduction or"),
    ],
)
def test_view_errors(shape, spec, message):
    with pytest.raises(ValueError, match=message):
        matrix_view(shape, spec)


def shapes(**paths):
    """A nested dict of shapes from keywords with double underscores for slashes."""
    tree: dict = {}
    for path, shape in paths.items():
        *parents, name = path.split("__")
        node = functools.reduce(lambda d, key: d.setdefault(key, {}), parents, tree)
        node[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


# Path and shape of parameters of real models, and what they are: dimension numbers or None.
KNOWN = [
    ("wte/embedding", (100, 8), None),
    ("wpe/embedding", (100, 8), None),
    ("Embed_0/embedding", (100, 8), None),
    ("token_embed/kernel", (8, 8), None),
    ("tok_embeddings/kernel", (100, 8), None),
    ("tok_emb/w", (100, 8), None),
    ("model/embed_tokens/embedding", (100, 8), None),
    ("lm_head/kernel", (8, 100), None),
    ("head/kernel", (8, 100), None),
    ("logits_dense/kernel", (8, 100), None),
    ("output/kernel", (8, 100), None),
    ("params/output/kernel", (8, 100), None),
    ("pos_embedding", (1, 16, 8), None),
    ("posemb/pos", (16, 8), None),
    ("encoder/position_table", (16, 8), None),
    ("blocks/ln_1/scale", (4, 8), None),
    ("blocks/LayerNorm_0/bias", (4, 8), None),
    ("blocks/RMSNorm_0/weight", (4, 8), None),
    ("attn/query/bias", (2, 4), None),
    ("blocks/mlp/Dense_0/bias", (4, 8), None),
    ("linear/b", (3, 8), None),
    ("b", (3, 8), Dims(0, 1)),
    ("final_norm/weight", (4, 8), None),
    ("q_norm", (4, 8), None),
    ("norm_proj/kernel", (8, 8), Dims(0, 1)),
    ("normalizer/kernel", (8, 8), Dims(0, 1)),
    ("subnormal", (8, 8), Dims(0, 1)),
    ("layer_norm/offset", (8,), None),
    ("h/0/attn/qkv/kernel", (8, 24), Dims(0, 1)),
    ("attention/output/dense/kernel", (8, 8), Dims(0, 1)),
    ("multi_head/kernel", (8, 8), Dims(0, 1)),
    ("time_embed/Dense_0/kernel", (8, 8), Dims(0, 1)),
    ("overhead/w", (8, 8), Dims(0, 1)),
    ("lnear/w", (8, 8), Dims(0, 1)),
    ("attn/query/kernel", (8, 8), Dims(0, 1)),
    ("attn/query/kernel", (8, 2, 4), Dims(0, (1, 2))),
    ("attn/out/kernel", (2, 4, 8), Dims((0, 1), 2)),
    ("layers/0/weight", (16, 8), Dims(1, 0)),
    ("transformer/~/linear/w", (8, 8), Dims(0, 1)),
]


@pytest.mark.parametrize("path, shape, expected", KNOWN)
def test_default_rules(path, shape, expected):
    tree = shapes(**{path.replace("/", "__"): shape})
    (spec,) = jax.tree.leaves(
        omp.muon_dimension_numbers(tree), is_leaf=lambda x: x is None or isinstance(x, Dims)
    )
    assert spec == expected


def test_a_bare_matrix_needs_no_path():
    assert omp.muon_dimension_numbers(jnp.ones((3, 4))) == Dims(0, 1)
    assert omp.partition_labels([jnp.ones((3, 4)), jnp.ones(3)]) == ["muon", "adam"]


def test_first_rule_wins_and_the_users_come_before_the_default_ones():
    tree = shapes(embed__kernel=(9, 8), conv__kernel=(3, 3, 4, 8), up__kernel=(8, 8), up__bias=(8,))
    rules = [
        ("embed", Dims(1, 0)),
        ("conv", Dims((0, 1, 2), 3), 4),
        ("up/kernel", None),
        ("up", Dims(0, 1)),  # takes nothing: the rule before it was first, and vectors are none
    ]
    made = omp.muon_dimension_numbers(tree, rules)
    assert made["embed"]["kernel"] == Dims(1, 0)
    assert made["conv"]["kernel"] == Dims((0, 1, 2), 3)
    assert made["up"] == {"kernel": None, "bias": None}


def test_rules_that_match_nothing_are_an_error_that_lists_the_paths():
    tree = shapes(up__kernel=(8, 8))
    with pytest.raises(ValueError, match=r"match no parameter: 'donw'.*up/kernel"):
        omp.muon_dimension_numbers(tree, [("donw", None)])


def test_leaves_of_three_axes_without_a_rule_are_an_error_that_lists_them():
    tree = shapes(moe__w1=(4, 8, 16), moe__w2=(4, 16, 8), conv__kernel=(3, 3, 4, 8))
    with pytest.raises(ValueError) as caught:
        omp.muonplus(0.1).init(tree)
    for part in ("moe/w1 (4, 8, 16)", "moe/w2", "conv/kernel (3, 3, 4, 8)", "rules=", "batch axes"):
        assert part in str(caught.value)


@pytest.mark.parametrize("rule", ["kernel", ("kernel",), ("kernel", (0, 1)), ("k", None, 2, 3)])
def test_malformed_rules(rule):
    with pytest.raises(ValueError, match=r"A rule is|must give MuonDimensionNumbers"):
        omp.muon_dimension_numbers(shapes(up__kernel=(8, 8)), [rule])


class Two(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 6, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(6, 4, rngs=rngs)])


@pytest.mark.parametrize("container", [dict, FrozenDict, "state", "pure"])
def test_one_dimension_number_tree_serves_every_container(container):
    """The paths of nnx variables end in `value` at init and not at update; lists become dicts."""
    state = nnx.state(Two(nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(state)
    params = {"state": state, "pure": pure}.get(container) or container(pure)
    tree = {"up": {"kernel": Dims(0, 1), "bias": None}, "layers": None}
    labels = omp.partition_labels(params, tree)
    assert jax.tree.structure(labels) == jax.tree.structure(params)
    by_path = {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): label
        for path, label in jax.tree_util.tree_flatten_with_path(labels)[0]
    }
    expected = {"up/kernel": "muon", "up/bias": "adam"}
    assert by_path == expected | {"layers/0/kernel": "adam", "layers/0/bias": "adam"}


def test_dimension_number_trees_that_do_not_match_say_where():
    params = shapes(up__kernel=(4, 6), down__kernel=(6, 4))
    with pytest.raises(ValueError, match="Parameters without an entry: down/kernel"):
        omp.muonplus(0.1, muon_weight_dimension_numbers={"up": Dims()}).init(params)
    with pytest.raises(ValueError, match="Entries without a parameter: side"):
        omp.muonplus(
            0.1, muon_weight_dimension_numbers={"up": Dims(), "down": None, "side": Dims()}
        ).init(params)
    with pytest.raises(ValueError, match=r"must be MuonDimensionNumbers.*got .*up.*'in, out'"):
        omp.muonplus(0.1, muon_weight_dimension_numbers={"up": "in, out", "down": None}).init(
            params
        )
    with pytest.raises(ValueError, match=r"up/bias: a parameter of shape \(6,\) is not a matrix"):
        omp.muonplus(0.1, muon_weight_dimension_numbers=Dims()).init(
            shapes(up__bias=(6,), up__kernel=(4, 6))
        )


def test_links_refuse_leaves_that_are_not_matrices():
    params = {"embed": {"kernel": jnp.ones((9, 4))}, "up": {"kernel": jnp.ones((4, 6))}}
    for link in (
        omp.orthogonalize(),
        omp.normalize(),
        omp.scale_by_shape(),
        omp.scale_by_muonplus(),
    ):
        with pytest.raises(ValueError, match=r"Not matrices: embed/kernel.*partition_labels"):
            link.init(params)


def test_describe_shows_groups_shapes_and_factors():
    params = shapes(
        blocks__0__qkv__kernel=(8, 24),
        blocks__1__qkv__kernel=(8, 24),
        blocks__10__qkv__kernel=(8, 24),
        moe__w=(3, 8, 32),
        wte__embedding=(50, 8),
        ln_f__scale=(8,),
    )
    dims = functools.partial(
        omp.muon_dimension_numbers,
        rules=[("qkv", omp.MatrixSpec(split_sizes=(8, 8, 8))), ("moe", Dims(1, 2))],
    )
    table = omp.describe(params, dims)
    lines = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert lines["blocks/{0..10}/qkv/kernel"] == (
        ["8x24", "muon", "8x8x1", "+", "8x8x1", "+", "8x8x1", "1", "+", "1", "+", "1", "3"]
    )
    assert lines["moe/w"] == ["3x8x32", "muon", "32x8x3", "2", "1"]
    assert lines["wte/embedding"] == ["50x8", "adam", "1"]
    assert "muon: 4 parameters, 12 matrices, 1,344 numbers; adam: 2 parameters" in table
    rms = omp.describe(params, dims, norm="row", consistent_rms=0.2)
    assert (
        "0.5657" in rms
    )  # 0.2 sqrt(8), the fan-in: the RMS after a row normalization is 1/sqrt(n)
    assert omp.describe({}).endswith("0 numbers")
