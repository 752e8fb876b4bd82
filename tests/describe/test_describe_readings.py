"""What `describe` says about how parameters were read: rules, folded paths, doubts, sizes."""

import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from optax_muonplus._leaves.paths import fold
from tests.support.trees import first_update, nested_shapes, random_tree


def rows(table):
    """By name, the line of each parameter; and the lines below the table."""
    lines = table.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("muon: "))
    return {line.split()[0]: line for line in lines[2:end]}, lines[end:]


@pytest.mark.parametrize(
    "paths, folded",
    [
        (["linear_1", "linear_3"], [("linear_{1,3}", 2)]),
        (["linear_1", "linear_2", "linear_3"], [("linear_{1..3}", 3)]),
        (["h/0/w", "h/2/w", "h/3/w", "h/10/w"], [("h/{0,2..3,10}/w", 4)]),
        (["a/0/b/0", "a/0/b/1", "a/1/b/0", "a/1/b/1"], [("a/{0..1}/b/{0..1}", 4)]),
        (["a/0/b/1", "a/1/b/0"], [("a/0/b/1", 1), ("a/1/b/0", 1)]),
        (["a/0/b/0", "a/0/b/1", "a/1/b/0"], [("a/0/b/{0..1}", 2), ("a/1/b/0", 1)]),
        (["l08", "l09", "l10"], [("l{08..10}", 3)]),
        (["l8", "l09", "l10"], [("l{8,09..10}", 3)]),
        (["only"], [("only", 1)]),
    ],
)
def test_folded_paths_are_those_that_are_there(paths, folded):
    assert fold(paths) == folded
    assert sorted(fold(paths[::-1])) == sorted(folded)


def test_rules_are_named():
    params = nested_shapes(
        up__kernel=(4, 6), up__weight=(4, 6), x=(4, 4), wte__embedding=(9, 4), up__bias=(6,), t=(3,)
    )
    found, _ = rows(omp.describe(params))
    assert {name: line.split("  ")[-1].strip() for name, line in found.items()} == {
        "up/kernel": "kernel: in, out (Flax, Keras)",
        "up/weight": "weight: out, in (Equinox, PyTorch, Haliax)",
        "x": "by default: in, out",
        "wte/embedding": "embedding",
        "up/bias": "bias or scale",
        "t": "vector",
    }
    tree = {"up": omp.MuonDimensionNumbers(0, 1), "x": None, "wte": None, "t": None}
    tree["up"] = {"kernel": omp.MuonDimensionNumbers(0, 1), "weight": None, "bias": None}
    found, _ = rows(omp.describe(params, tree))
    assert all(line.endswith("your dimension numbers") for line in found.values())
    rules = [("up/kernel", omp.MatrixSpec(split_sizes=(3, 3))), ("x", omp.MuonDimensionNumbers())]
    found, _ = rows(omp.describe(params, rules=rules))
    assert found["up/kernel"].endswith("your rule 'up/kernel'")
    assert found["x"].endswith("your rule 'x'")


def test_unknown_leaves_are_shown_and_refused():
    params = nested_shapes(
        **{f"blocks__{i}__moe__w1": (4, 8, 16) for i in range(12)},
        blocks__3__conv__w=(3, 3, 4, 8),
        up__kernel=(4, 6),
    )
    found, below = rows(omp.describe(params))
    row = " ".join(found["blocks/{0..11}/moe/w1"].split())
    assert row == "blocks/{0..11}/moe/w1 4x8x16 ? 12 no rule"
    assert below[0].endswith("?: 13 parameters")
    assert r"  ('^blocks/\\d+/moe/w\\d+$', omp.MuonDimensionNumbers(-2, -1), 3)," in below
    assert r"  ('^blocks/\\d+/conv/w$', omp.MuonDimensionNumbers((0, 1, 2), 3), 4)," in below
    with pytest.raises(ValueError, match=r"blocks/\{0\.\.11\}/moe/w1 \(4, 8, 16\)") as caught:
        omp.muonplus(0.1).init(params)
    assert below[1] == "?: no rule can read these."
    assert "\n".join(below[2:]) in str(caught.value)
    assert max(map(len, str(caught.value).splitlines())) < 80
    haliax = nested_shapes(layers__mlp__up__weight__0=(3, 8, 4))
    with pytest.raises(ValueError, match=r"', omp.MuonDimensionNumbers\(-1, -2\), 3\)"):
        omp.muon_dimension_numbers(haliax)
    with pytest.raises(ValueError, match=r"\('\^conv/weight\$', omp.*\(\(1, 2, 3\), 0\), 4\)"):
        omp.partition_labels(nested_shapes(conv__weight=(8, 4, 3, 3)))
    # What it says to write can be written.
    rules = [
        (r"moe/w\d+", omp.MuonDimensionNumbers(-2, -1)),
        ("conv/w", omp.MuonDimensionNumbers((0, 1, 2), 3)),
    ]
    assert "?" not in omp.describe(params, rules=rules)
    part = lambda params: {"up": None, "blocks": omp.muon_dimension_numbers(params["blocks"])}  # noqa: E731
    with pytest.raises(ValueError, match=r"moe/w1 \(4, 8, 16\)"):  # its paths are not the tree's
        omp.describe(params, part)


def test_a_matrix_with_as_many_outputs_as_an_embedding_has_rows_is_pointed_out():
    params = nested_shapes(
        embed__embedding=(1000, 64),
        linear__w=(64, 1000),
        wpe__embedding=(256, 64),
        up__w=(64, 256),
        back__w=(1000, 64),
        **{f"h_{i}__w": (64, 1000) for i in range(2)},  # repeated: no heads
    )
    _, below = rows(omp.describe(params))
    (doubt,) = [line for line in below if line.startswith("a head?")]
    assert doubt.startswith("a head? linear/w (64, 1000) has as many outputs as an embedding")
    assert "a head?" not in omp.describe(params, rules=[("linear/w", None)])


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "row"},
        {"norm": "col_row"},
        {"norm": "row_col", "shape_scale": "max"},
        {"norm": "none"},
        {"norm": "col", "match_frobenius": False},
        {"norm": "col_row", "consistent_rms": 0.2},
    ],
)
def test_the_rms_is_that_of_an_update(options):
    """The column is for an exact polar factor."""
    params = random_tree({"wide": {"kernel": (32, 4)}, "tall": {"kernel": (4, 128)}})
    updates = first_update(omp.muonplus(1.0, polar="svd", **options), params)
    found, _ = rows(omp.describe(params, **options))
    for name in params:
        rms = float(jnp.sqrt(jnp.mean(updates[name]["kernel"] ** 2)))
        assert float(found[f"{name}/kernel"].split()[5]) == pytest.approx(rms, rel=1e-2)


def test_an_rms_that_no_norm_makes_exact_is_said_to_be_nominal():
    params = random_tree({"up": {"kernel": (32, 4)}})
    told = {"consistent_rms": 0.2}
    nominal = [{"norm": "none"}, {"norm": "long"}, {"adaptive": True}]
    for options in nominal:
        assert "rms: as in Optax, of exact polar factors" in omp.describe(params, **options, **told)
    exact = [{}, {"norm": "row"}, {"match_frobenius": False}]
    for options in exact:
        table = omp.describe(params, **options, **told)
        update = first_update(omp.muonplus(1.0, **options, **told), params)["up"]["kernel"]
        assert "rms: as in" not in table
        assert float(jnp.sqrt(jnp.mean(update**2))) == pytest.approx(0.2, rel=1e-5)
        assert rows(table)[0]["up/kernel"].split()[5] == "0.2"
