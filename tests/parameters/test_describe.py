"""The table that `describe` prints, and the lines below it: heads, adapters, idle rules."""

import functools
import re

import jax
import jax.monitoring
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from optax.contrib import MuonDimensionNumbers as Dims

import optax_muonplus as omp
from tests.support.mesh import D, P, make_mesh, shape
from tests.support.trees import nested_shapes


def test_describe_shows_groups_shapes_and_factors():
    params = nested_shapes(
        blocks__0__qkv__kernel=(8, 24),
        blocks__1__qkv__kernel=(8, 24),
        blocks__10__qkv__kernel=(8, 24),
        gate_up__kernel=(8, 20),
        moe__w=(3, 8, 32),
        wte__embedding=(50, 8),
        ln_f__scale=(8,),
    )
    rules = [
        ("qkv", omp.MatrixSpec(split_sizes=(8, 8, 8))),
        ("gate", omp.MatrixSpec(split_sizes=(8, 8, 4))),
        ("moe", Dims(1, 2)),
    ]
    dims = functools.partial(omp.muon_dimension_numbers, rules=rules)
    table = omp.describe(params, dims)
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in table.splitlines()}
    # Equal blocks are a batch: three matrices of 8 x 8 in each of three parameters.
    assert lines["blocks/{0..1,10}/qkv/kernel"] == "8x24 muon 8x8x3 1 0.354 3 your rule 'qkv'"
    gate_up = "8x20 muon 8x8x2 + 4x8x1 1 + 1 0.354 + 0.354 1 your rule 'gate'"
    assert lines["gate_up/kernel"] == gate_up
    assert lines["moe/w"] == "3x8x32 muon 32x8x3 2 0.354 1 your rule 'moe'"
    assert lines["wte/embedding"] == "50x8 adam 1 embedding"
    assert "muon: 5 parameters, 15 matrices, 1,504 elements; adam: 2 parameters" in table
    rms = omp.describe(params, dims, norm="row", match_frobenius=False, consistent_rms=0.2)
    assert (
        "0.5657" in rms
    )  # 0.2 sqrt(8), the fan-in: the RMS after a row normalization is 1/sqrt(n)
    assert omp.describe({}).endswith("0 elements")


def test_describe_counts_the_bytes_of_the_state():
    tree = {"up": {"kernel": shape(512, 24)}, "wte": {"embedding": shape(10, 8, dtype="bfloat16")}}
    for options, muon in (({}, 4 * 12288), ({"mu_dtype": "bfloat16"}, 2 * 12288)):
        last = omp.describe(tree, **options).splitlines()[-1]
        assert last == f"bytes of state: muon {muon:,}, adam {2 * 2 * 80}"
    last = omp.describe(tree, mu_dtype="int8").splitlines()[-1]
    assert last == f"bytes of state: muon {12288 + 4 * 48:,}, adam 320"  # two blocks a column


@pytest.mark.several_devices
def test_describe_counts_the_bytes_of_the_state_on_a_device():
    """Also where it is cut over replicas, and where scales cannot be cut as often as codes."""
    mesh = make_mesh((4, 2), "ab")
    tree = {"up": {"kernel": shape(512, 24)}, "wte": {"embedding": shape(10, 8)}}
    wanted = {"up": NamedSharding(mesh, P("b")), "wte": NamedSharding(mesh, P())}
    for options, muon, adam in (
        ({}, 4 * 12288 // 2, 640),
        ({"state_sharding": "a"}, 4 * 12288 // 8, 160),
        ({"mu_dtype": "int8"}, (12288 + 4 * 48) // 2, 640),
        ({"mu_dtype": "int8", "state_sharding": "a"}, 12288 // 8 + 4 * 48, 160),
    ):
        table = omp.describe(tree, sharding=wanted, **options)
        assert table.endswith(f"; on each device muon {muon:,}, adam {adam}")
        tx = omp.muonplus(0.1, sharding=wanted, **options)
        params = jax.device_put(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), tree), wanted)
        shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tx.init(params)) if x.ndim]
        assert sum(x.nbytes for x in shards) == muon + adam


@pytest.mark.several_devices
def test_describe_shows_shardings_and_the_busiest_device():
    mesh = make_mesh((4, 2), "ab")
    tree = {f"{i}": {"kernel": shape(256, 256)} for i in range(12)} | {"bias": shape(D)}
    wanted = {name: NamedSharding(mesh, P("a")) for name in tree}
    table = omp.describe(tree, sharding=wanted)
    assert "sharding" in table.splitlines()[0]
    assert "(a, -)" in table and "(a)" in table
    share = 2 / (12 / 8)
    assert f"12 matrices shared out among 8 devices: the busiest has {share:.2f} x" in table
    experts = {"kernel": shape(8, 4, D, D)}
    cut = NamedSharding(mesh, P("a", None, "b"))
    table = omp.describe(experts, omp.MuonDimensionNumbers(-2, -1), sharding=cut)
    assert "32 matrices shared out among 8 devices: the busiest has 1.00 x" in table
    concrete = jax.device_put({"q": {"kernel": jnp.ones((D, D))}}, NamedSharding(mesh, P("b")))
    assert "(b, -)" in omp.describe(concrete)
    assert "sharding" not in omp.describe(tree)


CNN = nested_shapes(
    Conv_0__kernel=(3, 3, 1, 16),
    Conv_1__kernel=(3, 3, 16, 32),
    Dense_0__kernel=(512, 64),
    Dense_1__kernel=(64, 10),
)


def below(params, *args, **options):
    """The lines below the table, but for the totals."""
    lines = omp.describe(params, *args, **options).splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("muon: ")) + 1 : -1]


def rules_in(line):
    return eval(re.search(r"rules=(\[.*\])", line)[1])


def test_the_line_covers_all_that_may_be_heads():
    """It names the heads of all tables, and no parameter that is none."""
    params = nested_shapes(
        tok__embedding=(100, 16),
        words__embedding=(300, 16),
        out_a__kernel=(16, 100),
        out_b__kernel=(16, 100),
        x__y__kernel=(16, 300),
        way_out_a__kernel=(16, 16),
        z__out_a__kernel_2=(16, 16),
    )
    (line,) = [x for x in below(params) if x.startswith("a head?")]
    changed = omp.describe(params, rules=rules_in(line))
    assert "a head?" not in changed
    matrices = {x.split()[0] for x in changed.splitlines() if "  muon  " in x}
    assert matrices == {"way_out_a/kernel", "z/out_a/kernel_2"}


def test_what_the_user_said_is_a_matrix_is_not_asked_about():
    params = nested_shapes(tok__embedding=(100, 16), up__kernel=(16, 100))
    rules = [("up", omp.MuonDimensionNumbers(0, 1))]
    assert below(params) != below(params, rules=rules) == []


@pytest.mark.parametrize(
    ("params", "last"),
    [
        (CNN, "Dense_1/kernel"),
        (nested_shapes(layers__0__weight=(16, 8), layers__1__weight=(4, 16)), "layers/1/weight"),
        (
            nested_shapes(
                token__embedding=(100, 16), Dense_0__kernel=(16, 8), Dense_1__kernel=(8, 2)
            ),
            "Dense_1/kernel",
        ),
        (nested_shapes(Conv_0__kernel=(3, 3, 4, 16), Dense_0__kernel=(784, 10)), "Dense_0/kernel"),
    ],
    ids=["convolutions", "Equinox", "of text", "of all pixels"],
)
def test_the_last_layer_of_a_classifier_is_pointed_out(params, last):
    (line,) = [x for x in below(params) if x.startswith("a head?")]
    assert line.startswith(f"a head? {last} (")
    assert "a head?" not in omp.describe(params, rules=rules_in(line))


@pytest.mark.parametrize(
    "params",
    [
        {**CNN, "head": {"kernel": jax.ShapeDtypeStruct((10, 3), jnp.float32)}},
        nested_shapes(up__kernel=(8, 16), down__kernel=(16, 8)),
        nested_shapes(dense__kernel=(8, 4)),
        nested_shapes(h__0__gate__kernel=(8, 2), h__0__o__kernel=(8, 8)),
        nested_shapes(a__q_proj__kernel=(16, 8), b__kernel=(4, 16)),
    ],
    ids=["with a head", "residual", "alone", "in a block", "queries"],
)
def test_other_layers_are_not_pointed_out(params):
    assert "a head?" not in omp.describe(params)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (
            nested_shapes(registers=(4, 16), up__kernel=(16, 32)),
            "a table? registers (4, 16): no rule knows the name",
        ),
        (
            nested_shapes(attn__qkv__kernel=(16, 48), c_attn__kernel=(16, 48), mlp__w13=(16, 64)),
            "fused? attn/qkv/kernel (16, 48), c_attn/kernel (16, 48), mlp/w13 (16, 64): one",
        ),
    ],
    ids=["a table", "fused"],
)
def test_what_a_name_leaves_open_is_asked_until_a_rule_says_it(params, line):
    assert any(x.startswith(line) for x in below(params))
    rules = [("registers|qkv|c_attn|w13", omp.MuonDimensionNumbers(0, 1))]
    assert below(params, rules=rules) == []


def test_one_question_is_enough_for_a_matrix():
    lines = below(nested_shapes(Conv_0__kernel=(3, 3, 4, 16), last=(784, 10)))
    (line,) = [x for x in lines if "? last" in x]
    assert line.startswith("a head? last (784, 10)")


def test_heads_of_a_fused_kernel_are_not_asked_about():
    assert below(nested_shapes(attn__qkv__kernel=(16, 48)), omp.per_head(4)) == []


def test_a_table_is_not_asked_about_where_other_parameters_have_its_length():
    assert below(nested_shapes(wq=(16, 16), wo=(16, 16), up=(16, 64), down=(64, 16))) == []


def test_adapters_are_matrices_and_said_to_be():
    params = nested_shapes(q__lora_a=(64, 8), q__lora_b=(8, 64), v__lora_A__weight=(8, 64))
    (line,) = [x for x in below(params) if x.startswith("LoRA: ")]
    assert "q/lora_a (64, 8), q/lora_b (8, 64), v/lora_A/weight (8, 64) are matrices" in line
    assert "muon: 0 parameters" in omp.describe(params, rules=rules_in(line))
    chosen = [("lora_", omp.MuonDimensionNumbers(0, 1))]
    assert "LoRA: " not in omp.describe(params, rules=chosen)


def test_a_tree_without_a_matrix_is_said_to_have_none():
    params = nested_shapes(embed__embedding=(9, 4), up__kernel=(4, 8))
    nothing = "no matrix: AdamW gets every parameter, "
    (line,) = below(params, rules=[(".", None)])
    assert line == nothing + "also those of two axes and more, as: your rule '.'"
    assert below(nested_shapes(norm__scale=(4,))) == [nothing + "since none has two axes"]
    assert below(params) == []


def test_rules_behind_others_are_named():
    """Also of layers, in `per_head` and in a function; one that decides anything is not."""
    params = nested_shapes(a__query__kernel=(4, 8), b__kernel=(8, 4), c=(4, 4))
    numbers = omp.MuonDimensionNumbers(0, 1)
    rules = [("kernel", numbers), ("b/kernel", None), ("c|a", numbers), ("kernel", numbers)]
    said = [
        "without effect: rule 'b/kernel', since others before it take all that it finds",
        "without effect: rule 'kernel', since others before it take all that it finds",
    ]
    assert below(params, rules=rules) == said
    assert below(params, functools.partial(omp.muon_dimension_numbers, rules=rules)) == said
    assert below(params, omp.per_head(4, rules=rules)) == said
    stacked = nested_shapes(layers__up__kernel=(3, 4, 8))
    (line,) = below(stacked, layer_axes={"layers": 0, "up": 1})
    assert line.startswith("without effect: layer_axes 'up'")


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'rule'"):
        omp.describe(CNN, rule=[])


def test_a_state_is_not_described():
    state = optax.chain(omp.muonplus(0.1)).init({"up": jnp.ones((4, 4))})
    with pytest.raises(ValueError, match=r"state of an optimizer in place.*not say by which norm"):
        omp.describe(state)


@pytest.mark.parametrize("make", [omp.muonplus, omp.muon, omp.contrib.normuon])
def test_one_vector_of_all_parameters_is_refused(make):
    params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
    for tx in (
        optax.flatten(make(0.1)),
        optax.flatten(optax.chain(optax.clip(1.0), make(0.1))),
    ):
        with pytest.raises(ValueError, match=r"one vector of shape \(40,\).*optax\.flatten"):
            tx.init(params)
    vectors = {"norm": {"scale": jnp.ones(4)}}
    make(0.1).init(vectors)
    left_out = optax.masked(make(0.1), {"dense": {"kernel": False, "bias": True}})
    left_out.init(params)
