"""The table that `describe` prints, and the lines below it: meshes and heads."""

import re

import jax
import jax.monitoring
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
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
    table = omp.describe(params, rules=rules)
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in table.splitlines()}
    # Equal blocks are a batch: three matrices of 8 x 8 in each of three parameters.
    assert lines["blocks/{0..1,10}/qkv/kernel"] == "8x24 muon 8x8x3 1 0.354 3 your rule 'qkv'"
    gate_up = "8x20 muon 8x8x2 + 4x8x1 1 + 1 0.354 + 0.354 1 your rule 'gate'"
    assert lines["gate_up/kernel"] == gate_up
    assert lines["moe/w"] == "3x8x32 muon 32x8x3 2 0.354 1 your rule 'moe'"
    assert lines["wte/embedding"] == "50x8 adam 1 embedding"
    assert "muon: 5 parameters, 15 matrices, 1,504 elements; adam: 2 parameters" in table
    options = {"norm": "row", "match_frobenius": False, "consistent_rms": 0.2}
    rms = omp.describe(params, rules=rules, **options)
    assert (
        "0.5657" in rms
    )  # 0.2 sqrt(8), the fan-in: the RMS after a row normalization is 1/sqrt(n)
    assert omp.describe({}).endswith("0 elements")


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
    return lines[next(i for i, line in enumerate(lines) if line.startswith("muon: ")) + 1 :]


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
        (nested_shapes(Conv_0__kernel=(7, 7, 3, 64), Dense_0__kernel=(64, 100)), "Dense_0/kernel"),
        (nested_shapes(Conv_0__kernel=(7, 7, 64, 64), Dense_0__kernel=(64, 7)), "Dense_0/kernel"),
        (
            nested_shapes(
                wte__embedding=(50257, 768),
                blocks__0__up__kernel=(768, 3072),
                blocks__0__down__kernel=(3072, 768),
                fc__kernel=(768, 50304),
            ),
            "fc/kernel",
        ),
    ],
    ids=[
        "convolutions",
        "Equinox",
        "of text",
        "of all pixels",
        "more outputs than inputs",
        "as many outputs as a window is wide",
        "padded vocabulary",
    ],
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
        nested_shapes(attn__qkv__kernel=(8, 24), glu__value__kernel=(8, 24), o__kernel=(8, 8)),
        nested_shapes(lstm__weight_ih_l0=(32, 8), rnn__recurrent_kernel=(8, 32), o__kernel=(8, 8)),
        nested_shapes(mod__adaLN_modulation__kernel=(8, 48), x__in_proj__kernel=(8, 32)),
    ],
    ids=["with a head", "residual", "alone", "in a block", "fused", "recurrent", "first layers"],
)
def test_other_layers_are_not_pointed_out(params):
    assert "a head?" not in omp.describe(params)


def test_heads_of_attention_are_no_heads_of_a_model():
    """Rules next to omp.per_head are an error: they are an argument of it."""
    shapes = {f"{name}__kernel": (32, 32) for name in ("query", "key", "value", "out")}
    heads = omp.per_head(8)
    assert below(nested_shapes(**shapes), heads) == []
    params = nested_shapes(**shapes, Dense_0__kernel=(32, 100))
    (line,) = below(params, heads)
    assert line.startswith("a head? Dense_0/kernel (32, 100) has outputs")
    assert line.endswith("It is an argument of omp.per_head.")
    rules = eval(re.search(r"rules=(\[.*\])", line)[1])
    assert below(params, omp.per_head(8, rules=rules)) == []


WIDE = nested_shapes(up__kernel=(64, 720), down__kernel=(720, 64), x__kernel=(719, 64))


@pytest.mark.parametrize(
    ("params", "odd"),
    [
        (nested_shapes(a__g=(16, 64)), "a/g (16, 64)"),
        (nested_shapes(a__g=(17, 64)), None),
        (nested_shapes(a__g=(20, 720)), "a/g (20, 720)"),
        (nested_shapes(a__g=(20, 719)), None),
        (nested_shapes(kv_einsum__w=(65, 1, 32, 32)), "kv_einsum/w (65, 1, 32, 32)"),
        (nested_shapes(kv_einsum__w=(64, 1, 32, 32)), None),
        (nested_shapes(**{f"l__{i}__g": (6, 64) for i in range(3)}), "l/{0..2}/g (6, 64)"),
    ],
)
def test_narrow_matrices_and_very_many_are_asked_about(params, odd):
    """Of a narrow one or one of many a wrong axis is more likely than a layer."""
    params = {**params, **WIDE}
    lines = [x for x in below(params) if x.startswith("a matrix?")]
    assert [re.search(r"a matrix\? (.*) has a side", x)[1] for x in lines] == ([odd] if odd else [])
    assert below(params, rules=[(".", None, 2), (".", None)]) == []
    rules = [(".", omp.MuonDimensionNumbers(-2, -1))]
    assert not any(x.startswith("a matrix?") for x in below(params, rules=rules))


def test_experts_are_counted_in_one_layer():
    params = nested_shapes(layers__experts__up__kernel=(30, 60, 32, 32), layers__scale=(30, 32))
    assert below(params, layer_axes={"layers": 0}) == []


def test_a_small_model_has_no_narrow_matrices():
    assert below(nested_shapes(a__kernel=(8, 16), b__kernel=(16, 8))) == []


def test_describe_refuses_what_muonplus_refuses():
    with pytest.raises(ValueError, match="ns_steps must be an integer"):
        omp.describe({}, ns_steps=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nstep'"):
        omp.describe({}, nstep=5)


@pytest.mark.several_devices
def test_arrays_on_an_auto_mesh_without_a_sharding_are_named():
    """Under `jax.jit` they do not say where they lie: 42 collectives where 2 would do."""
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh((4, 2), "ab", kind)
        params = {"q": {"kernel": jnp.ones((D, D))}, "bias": jnp.ones(D)}
        params = jax.device_put(params, NamedSharding(mesh, P("a")))
        line = "on Auto mesh axes without sharding=: q/kernel. Under jax.jit"
        assert (line in omp.describe(params)) == (kind is AxisType.Auto)
        sharding = jax.tree.map(lambda x: x.sharding, params)
        assert line not in omp.describe(params, sharding=sharding)
    assert "Auto" not in omp.describe({"q": {"kernel": jnp.ones((D, D))}})


@pytest.mark.parametrize("make", [omp.muonplus, omp.muon])
def test_one_vector_of_all_parameters_is_warned_of(make):
    params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
    for tx in (
        optax.flatten(make(0.1)),
        optax.flatten(optax.chain(optax.clip(1.0), make(0.1))),
    ):
        with pytest.warns(UserWarning, match=r"one vector of shape \(40,\).*optax\.flatten"):
            tx.init(params)
    vectors = {"norm": {"scale": jnp.ones(4)}}
    make(0.1).init(vectors)
    left_out = optax.masked(make(0.1), {"dense": {"kernel": False, "bias": True}})
    left_out.init(params)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_the_precision_of_products_on_an_accelerator(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    kernel = {"q": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    with jax.default_matmul_precision(None):
        text = omp.describe(kernel)
        told = omp.describe(kernel, compute_dtype="bfloat16")
        exact = omp.describe(kernel, polar="svd")
    expected = (
        f'products: in bfloat16 on this {backend}, summed in float32; compute_dtype="float32"'
    )
    assert (expected in text) == (backend != "cpu")
    assert "products:" not in told + exact
    with jax.default_matmul_precision("highest"):
        assert "products:" not in omp.describe(kernel)
