"""Stacked layers whose axis nobody stated: asked for first, and their vectors are no matrices."""

import pytest

import optax_muonplus as omp
from optax_muonplus.trees import reader_of, resolve
from tests.support.trees import nested_shapes

NUMBERS = omp.MuonDimensionNumbers(-2, -1)
KERNELS = {f"layers__{x}": (3, 64, 64) for x in ("wq", "wo", "w1")}
VECTORS = {f"layers__{x}": (3, 64) for x in ("g1", "b1", "bq", "ls1", "b_in", "D", "of__weight")}
REST = {"embed__embedding": (100, 64), "lm_head__kernel": (64, 100)}
SCANNED = nested_shapes(**KERNELS, **VECTORS, **REST)


def groups(params, rules=(), layer_axes=None):
    leaves = resolve(params, reader_of(None, rules, layer_axes), strict=False).leaves
    return {leaf.name: leaf.label for leaf in leaves}


def asked(params, **options):
    """What the error says to pass, as arguments; it must say one thing only."""
    with pytest.raises(ValueError, match="No rule says") as caught:
        omp.muonplus(0.1, **options).init(params)
    assert "rules=" not in str(caught.value)
    (line,) = [x for x in str(caught.value).splitlines() if x.startswith("layer_axes=")]
    return {"layer_axes": eval(line.removeprefix("layer_axes="))}


def test_what_the_error_says_makes_kernels_matrices_and_nothing_else():
    told = asked(SCANNED)
    assert told == {"layer_axes": {"layers": 0}}
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
    assert asked(SCANNED, rules=rules) == {"layer_axes": {"layers": 0}}
    # A rule of the user's own settles it.
    own = [*rules, ("layers/g1", omp.MuonDimensionNumbers(0, 1)), ("layers/", None)]
    found = groups(SCANNED, rules=own)
    assert found["layers/g1"] == "muon" and found["layers/b1"] == "adam"


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ({"net__a__w": (3, 8, 8), "net__b__g": (3, 8), "net__depth": (3,)}, {"net": 0}),
        ({"wq": (3, 8, 8), "g1": (3, 8), "embed": (20, 8)}, {"^(g1|wq)(/|$)": 0}),
        (
            {"p__layers__a__w": (8, 3, 2, 4), "p__layers__g": (8, 3), "q__layers_w": (8, 8)},
            {"p/layers": 1},
        ),
        (
            {"e__layers__w": (3, 8, 8), "e__layers__g": (3, 8)}
            | {"d__layers__w": (2, 8, 8), "d__layers__g": (2, 8)},
            {"layers": 0},
        ),
        ({"layers__moe__w": (3, 4, 8, 8), "layers__norm__scale": (3, 8)}, {"layers": 0}),
    ],
    ids=["any name", "at the root", "axis 1", "two stacks", "norms that are known"],
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
    with pytest.raises(ValueError, match=r"(?s)No rule says.*rules=\["):
        omp.muonplus(0.1).init(params)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"layers__up__w1": (64, 256), "layers__down__w1": (256, 64)},
            r"several numbers of layers below 'layers': 256 in layers/down/w1 \(256, 64\); 64 in",
        ),
        (
            {"layers__up__kernel": (3, 4, 8), "layers__shared__kernel": (4, 8)},
            r"4 in layers/shared/kernel \(4, 8\); 3 in layers/up/kernel \(3, 4, 8\)",
        ),
        ({"layers__up__kernel": (4, 8)}, r"takes an axis of layers/up/kernel \(4, 8\) for layers"),
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
    line = "layer_axes: one layer of layers/g (3, 8) has no matrix"
    assert line in omp.describe(nested_shapes(layers__g=(3, 8)), layer_axes={"layers": 0})
