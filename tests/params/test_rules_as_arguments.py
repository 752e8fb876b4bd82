"""``rules=`` and ``layer_axes=`` of optimizers, links, ``describe`` and labels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support.trees import nested_shapes, random_like

PARAMS = random_like(
    nested_shapes(
        layers__mlp__up__kernel=(2, 4, 6), layers__norm__scale=(2, 4), experts__w=(2, 3, 5)
    )
)


def name_of(make):
    return getattr(make, "func", make).__name__


RULES = [("experts/", omp.MuonDimensionNumbers(-2, -1))]
AXES = {"layers": 0}
OPTIMIZERS = [omp.muonplus, omp.muon]
LINKS = [
    omp.orthogonalize,
    omp.normalize,
    omp.scale_by_shape,
    omp.scale_by_muonplus,
    functools.partial(omp.matrix_chain, jnp.sign),
    functools.partial(omp.matrix_chain, omp.momentum()),
]


def by_function():
    return functools.partial(omp.muon_dimension_numbers, rules=RULES, layer_axes=AXES)


@pytest.mark.parametrize("make", [functools.partial(x, 0.1) for x in OPTIMIZERS], ids=name_of)
def test_every_optimizer_takes_rules(make):
    with pytest.raises(ValueError, match="No rule fits"):
        make().init(PARAMS)
    labels = make(rules=RULES, layer_axes=AXES).init(PARAMS)
    given = make(muon_weight_dimension_numbers=by_function()).init(PARAMS)
    assert jax.tree.structure(labels) == jax.tree.structure(given)
    with pytest.raises(ValueError, match="Got rules or layer_axes next to dimension numbers"):
        make(rules=RULES, layer_axes=AXES, muon_weight_dimension_numbers=by_function())


@pytest.mark.parametrize("make", LINKS, ids=name_of)
def test_every_link_takes_rules(make):
    matrices = {"experts": PARAMS["experts"], "layers": {"mlp": PARAMS["layers"]["mlp"]}}
    with pytest.raises(ValueError, match="No rule fits"):
        make().init(matrices)
    make(where=omp.Matrices(RULES, AXES)).init(matrices)
    inside = make(where=omp.Matrices(RULES))
    with pytest.raises(ValueError, match="Got two different where="):
        omp.matrix_chain(inside, where=omp.Matrices(RULES))


def test_the_update_is_that_of_the_same_rules_in_a_function():
    grads = random_like(PARAMS, seed=1)
    updates = []
    for options in (
        {"rules": RULES, "layer_axes": AXES},
        {"muon_weight_dimension_numbers": by_function()},
    ):
        tx = omp.muonplus(0.1, polar="svd", **options)
        state = tx.init(PARAMS)
        for _ in range(2):
            made, state = tx.update(grads, state, PARAMS)
        updates.append(made)
    jax.tree.map(np.testing.assert_array_equal, *updates)
    injected = optax.inject_hyperparams(omp.muonplus)(0.1, rules=RULES, layer_axes=AXES)
    injected.init(PARAMS)


def test_describe_and_labels_take_rules():
    table = omp.describe(PARAMS, rules=RULES, layer_axes=AXES)
    assert "5x3x2" in table and "6x4x2" in table
    where = omp.Matrices(RULES, AXES)
    matrices = omp.matrix_chain(omp.momentum(), where=where)
    labels = omp.partition_labels(PARAMS, matrices)
    assert labels == omp.Matrices(weight_dimension_numbers=by_function()).read(PARAMS).labels
    optax.partition({"muon": matrices, "adam": optax.sgd(0.1)}, matrices.labels).init(PARAMS)


@pytest.mark.parametrize(
    "rules",
    [
        {"kernel": None},
        "kernel",
        iter(RULES),  # it would be empty the second time it is read
        ("kernel", None),
        [("k", None, 2, 3)],
        [("kernel", 0)],
    ],
    ids=lambda rules: type(rules).__name__,
)
def test_what_is_no_rule_is_refused_when_built(rules):
    for make in (omp.muonplus, omp.per_head):
        with pytest.raises(ValueError, match=r"rules must be a list of \(pattern"):
            make(4, rules=rules)


def test_axes_of_layers_may_be_integers_of_numpy():
    axes = {name: np.int64(axis) for name, axis in AXES.items()}
    found = omp.Matrices(RULES, axes).read(PARAMS).labels
    assert found == omp.Matrices(RULES, AXES).read(PARAMS).labels


def test_rules_next_to_per_head_are_given_to_it():
    with pytest.raises(ValueError, match=r"Got rules .* omp.per_head\(64, rules="):
        omp.muonplus(0.1, muon_weight_dimension_numbers=omp.per_head(4), rules=RULES)


def test_suggestions_are_right_for_each_leaf_and_stand_on_lines_of_their_own():
    params = [jnp.ones((4, 5, 6)), jnp.ones((3, 3, 4, 8)), jnp.ones((4, 4))]
    with pytest.raises(ValueError) as caught:
        omp.muonplus(0.1).init(params)
    lines = str(caught.value).splitlines()
    assert r"  ('^\\d+$', omp.MuonDimensionNumbers(-2, -1), 3)," in lines
    assert r"  ('^\\d+$', omp.MuonDimensionNumbers((0, 1, 2), 3), 4)," in lines
    assert max(map(len, lines)) < 80
    written = [eval(line.strip().rstrip(","), {"omp": omp}) for line in lines if "('^" in line]
    table = omp.describe(params, rules=written)
    assert "8x36x1" in table and "6x5x4" in table and "by default: in, out" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rules": [("bias", omp.MuonDimensionNumbers(0, 1))]},
            r"^Patterns that match no parameter: 'bias'. .* a vector is .* b/bias \(2,\)",
        ),
        ({"rules": [("x", None)]}, "^Patterns that match no parameter: 'x'.*The paths are: b/bias"),
        (
            {"layer_axes": {"layers": 0}},
            "^Patterns that match no parameter: 'layers'",
        ),
    ],
)
def test_what_finds_nothing_is_refused_with_the_paths(options, message):
    params = {"b": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}}
    with pytest.raises(ValueError, match=message):
        omp.muonplus(0.1, **options).init(params)


def test_a_suggested_pattern_does_not_find_what_is_known():
    tree = nested_shapes(a__0__w=(4, 5, 6), b__a__0__w=(4, 4), c__moe_1=(2, 3, 4), c__moe_2=(2, 2))
    with pytest.raises(ValueError) as caught:
        omp.muonplus(0.1).init(tree)
    lines = [line.strip().rstrip(",") for line in str(caught.value).splitlines() if "('" in line]
    table = omp.describe(tree, rules=[eval(line, {"omp": omp}) for line in lines])
    assert table.count("your rule") == 2


KEYSTR = [
    "['head']['kernel']",
    '["head"]["kernel"]',
    "['layers'][0]['kernel']",
    ".layers[0].kernel",
    "[0]",
    "[<flat index 2>]",
    r"\['head'\]",
    ".blocks[0]",
    "^.layers[12].attn",
]


@pytest.mark.parametrize("pattern", KEYSTR)
def test_a_path_as_jax_writes_it_is_refused(pattern):
    """A regular expression of such classes of characters finds almost any path."""
    params = nested_shapes(head__kernel=(4, 6), my__head__kernel=(4, 6))
    message = "is a path as jax.tree_util.keystr writes it"
    for options in ({"rules": [(pattern, None)]}, {"layer_axes": {pattern: 0}}):
        with pytest.raises(ValueError, match=message):
            omp.muonplus(0.1, **options).init(params)
    with pytest.raises(ValueError, match=message):
        omp.per_head({pattern: 2})


def test_classes_of_characters_and_names_with_dots_are_patterns():
    omp.describe(nested_shapes(head__kernel=(4, 6)), rules=[("[hH]ead/[a-k]", None)])
    layer = {"w1": jnp.ones((4, 6)), "w2": jnp.ones((6, 4))}
    for pattern in ("w[12]$", "w[1]", "^[01]/w", "[12]$", r"\d/w[0-9]", "1/.[12]", ".*[12]"):
        omp.describe([layer, layer], rules=[(pattern, None)])
    omp.describe({"model.head.weight": jnp.ones((4, 6))}, rules=[(".head.weight", None)])


def test_rules_of_a_list_may_match_nothing_and_ask_the_neighbours():
    shapes = {
        "actor__mean__kernel": (64, 6),
        "glu__value__kernel": (64, 8),
        "glu__gate__kernel": (64, 8),
    }
    params = nested_shapes(**shapes)
    numbers = omp.muon_dimension_numbers(params, [("glu/gate", None), *omp.rules.AGENTS])
    assert numbers["actor"]["mean"]["kernel"] is None
    assert numbers["glu"]["value"]["kernel"] == omp.MuonDimensionNumbers(0, 1)
    assert numbers["glu"]["gate"]["kernel"] is None
    assert omp.muon_dimension_numbers(params)["actor"]["mean"]["kernel"] is not None
    with pytest.raises(ValueError, match="Patterns that match no parameter: 'nowhere'"):
        omp.muon_dimension_numbers(params, [("nowhere", None), *omp.rules.AGENTS])


ROUTERS_AND_GATES = {
    "layers__0__mlp__gate__weight": (8, 64),  # Qwen, DeepSeek
    "layers__0__block_sparse_moe__gate__weight": (8, 64),  # Mixtral, Kimi
    "layers__0__ffn__gate__weight": (8, 64),
    "layers__1__mlp__router__kernel": (64, 8),  # tunix
    "layers__2__mlp__router": (8, 64),
    "layers__0__feed_forward__router_weights": (64, 8),
    "layers_0__MoeBlock_0__gate__kernel": (64, 8),  # MaxText
    "layers_0__routed_experts__gate__kernel": (64, 8),
    "layers__0__mlp__shared_expert_gate__weight": (4, 64),
    "layers__0__linear_attn__in_proj_z__weight": (64, 64),
    "layers__0__linear_attn__in_proj_ba__weight": (8, 64),
    "layers__0__self_attn__g_proj__weight": (64, 64),
    "layers__0__attn__output_gate__kernel": (64, 64),
    "layers__0__mlp_hyper_connection__input_mix_weight_down__weight": (4, 64),
}
MATRICES = {
    "dense__mlp__gate__kernel": (64, 96),
    "dense__mlp__up__kernel": (64, 96),
    "other__mlp__gate__kernel": (64, 96),
    "other__mlp__wi__kernel": (64, 96),
    "layers__3__mlp__experts__gate__kernel": (64, 96),
    "layers__3__mlp__experts__up__kernel": (64, 96),
    "layers__3__mlp__gate_proj__weight": (96, 64),
    "layers__0__mlp__shared_expert__gate_proj__weight": (96, 64),
    "layers__0__linear_attn__in_proj_qkv__weight": (96, 64),
    "layers__0__self_attn__kv_a_proj_with_mqa__weight": (20, 64),  # latent attention, on Muon
    "layers__0__hc_attn_fn": (24, 64),
}


def test_routers_and_output_gates_are_told_from_gates_of_feed_forward_layers():
    params = nested_shapes(**ROUTERS_AND_GATES, **MATRICES)
    paths = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="__"), params
    )
    numbers = omp.muon_dimension_numbers(params, omp.rules.MOE)
    specs = jax.tree.structure(paths).flatten_up_to(numbers)
    found = zip(jax.tree.leaves(paths), specs, strict=True)
    assert {path for path, spec in found if spec is None} == set(ROUTERS_AND_GATES)


@pytest.mark.parametrize("rules", [[], omp.rules.MAXTEXT])
def test_routers_of_stacked_layers_are_found(rules):
    """With layers on axis 1, as in MaxText."""
    params = nested_shapes(
        moe_layers__MoeBlock_0__gate__kernel=(64, 3, 8), moe_layers__mlp__wi__kernel=(64, 3, 96)
    )
    axes = {"layers/": 1}
    numbers = omp.muon_dimension_numbers(params, [*omp.rules.MOE, *rules], axes)["moe_layers"]
    assert numbers["MoeBlock_0"]["gate"]["kernel"] is None
    assert numbers["mlp"]["wi"]["kernel"] is not None


@pytest.mark.parametrize(
    ("kernel", "bias"), [((4, 4, 6, 12), 6), ((4, 6, 12), 6), ((1, 1, 6, 12), 6), ((5, 5, 4, 8), 4)]
)
@pytest.mark.parametrize("name", ["up", "ConvTranspose_0"])
def test_a_transposed_convolution_is_proposed_with_the_outputs_of_its_bias(kernel, bias, name):
    params = nested_shapes(**{f"{name}__kernel": kernel, f"{name}__bias": (bias,)})
    with pytest.raises(ValueError, match="No rule fits") as caught:
        omp.muon_dimension_numbers(params)
    (line,) = [x.strip().rstrip(",") for x in str(caught.value).splitlines() if "('" in x]
    rule = eval(line, {"omp": omp})
    assert "guess" not in str(caught.value)
    assert rule[1].output_axis == len(kernel) - 2
    assert omp.muon_dimension_numbers(params, [rule])[name]["kernel"] == rule[1]


@pytest.mark.parametrize(
    ("path", "shape", "axes"),
    [
        ("attn/qkv_proj/kernel", (512, 3, 8, 64), (0, (1, 2, 3))),
        ("attn/q/kernel", (512, 8, 64), (0, (1, 2))),
        ("attn/out_proj/kernel", (8, 64, 512), ((0, 1), 2)),
        ("attn/q_proj/weight", (8, 64, 512), (-1, -2)),
        ("attn/o_proj/weight", (512, 8, 64), (-1, 0)),
        ("gemma/q_proj/kernel", (8, 2048, 256), (-2, -1)),
        ("scanned/q_proj/kernel", (12, 512, 512), (-2, -1)),
        ("scanned/o_proj/kernel", (12, 512, 512), (-2, -1)),
        ("moe/o_proj/kernel", (4, 256, 512), (-2, -1)),
        ("mlp/wi", (512, 2, 2048), (0, -1)),
        ("moe/gate/kernel", (2048, 26, 64), (0, -1)),
        ("kan/spline_weight", (12, 8, 5), ((1, 2), 0)),
        ("fno/spectral_conv_0/weight_real", (6, 10, 4, 4), (0, 1)),
        ("fno/fourier/weights", (6, 10, 4), (0, 1)),
        ("up_1/kernel", (3, 3, 8, 16), ((0, 1, 2), 3)),
        ("spectral_norm/up/kernel", (3, 3, 8, 16), ((0, 1, 2), 3)),
        ("deconv_1/w", (4, 4, 8, 16), ((0, 1, 3), 2)),
    ],
)
def test_a_proposal_has_likely_axes_and_is_called_a_guess(path, shape, axes):
    with pytest.raises(ValueError, match="No rule fits") as caught:
        omp.muon_dimension_numbers(nested_shapes(**{path.replace("/", "__"): shape}))
    text = str(caught.value)
    assert f"omp.MuonDimensionNumbers{axes}, {len(shape)}),\n" in text
    assert f"\n{axes} is a guess from names and shapes." in text


def test_a_bias_of_each_layer_says_nothing_of_one_matrix():
    with pytest.raises(ValueError, match=r"\(-2, -1\) is a guess"):
        omp.muon_dimension_numbers(nested_shapes(a__kernel=(6, 64, 512), a__bias=(6, 512)))


@pytest.mark.parametrize(
    ("kernel", "bias", "axes"),
    [
        ((8, 64, 512), (512,), ((0, 1), 2)),
        ((5, 12, 24), (24,), ((0, 1), 2)),
        ((512, 8, 64), (8, 64), (0, (1, 2))),
        ((512, 3, 8, 64), (3, 8, 64), (0, (1, 2, 3))),
        ((32, 6, 512, 64), (512, 64), ((0, 1), (2, 3))),
    ],
)
def test_a_bias_says_which_axis_has_the_outputs(kernel, bias, axes):
    with pytest.raises(ValueError, match="No rule fits") as caught:
        omp.muon_dimension_numbers(nested_shapes(a__kernel=kernel, a__bias=bias))
    assert f"omp.MuonDimensionNumbers{axes}, {len(kernel)}),\n" in str(caught.value)
    assert "guess" not in str(caught.value)
