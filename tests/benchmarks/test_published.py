"""`benchmarks.published`: the cases are those that were measured, and their table is kept."""

import collections
import json
import math

import jax
import pytest

import optax_muonplus as omp
from benchmarks import products, published
from benchmarks.published import CASES, Case
from examples.compiled_programs import targets
from tests.support.documents import ROOT

KEPT = json.loads((ROOT / "results" / "benchmarks" / "published.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("name", "share"),  # of eight H100's peak, as marin #6493 says them
    [
        ("MuonH, 26 layers of 256 experts, 3 steps", 0.5056),
        ("its experts alone, 3 steps", 0.5863),
        ("MuonH, 2 of these layers, 5 steps", 0.481),
        ("its experts alone, 5 steps", 0.592),
    ],
)
def test_products_of_marins_update_are_as_many_as_it_counted(name, share):
    """It counts none of norms of rank 128, which are left out here."""
    row = KEPT[name]
    done = row["times"] * row["operations_of_products"] / row["measured_s"]
    assert done / 989e12 == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rule != "norms"])
def test_kept_operations_are_those_of_the_shapes(name):
    case, needed = CASES[name], 0
    options = omp.polar.Orthogonalize(
        case.coefficients, case.steps, polar=case.polar, compute_dtype=case.compute_dtype
    )
    for shape in case.layer.values():
        matmuls = omp.polar.matmul_shapes(shape, options, "gpu")
        each = products.flops(collections.Counter(matmuls))
        needed += case.layers * math.prod(shape[:-2]) * each
    share = needed / targets.parse(case.target).devices
    # Of the busiest device, and with the zeros that fill up odd sides.
    assert share <= KEPT[name]["operations_of_products"] < 1.06 * share


def test_the_kept_table_is_of_these_cases():
    assert list(KEPT) == list(CASES)
    for name, case in CASES.items():
        assert {key: KEPT[name][key] for key in ("source", "target", "steps", "times")} == {
            "source": case.source, "target": case.target, "steps": case.steps, "times": case.times
        }  # fmt: skip
        assert KEPT[name]["measured_s"] == pytest.approx(case.measured_s)


@pytest.mark.parametrize("rule", ["muon", "muonh", "polar factor", "norms"])
def test_a_case_has_the_update_that_its_rule_says(rule):
    case = Case("", 1.0, "cpu:8", {"up": (16, 48), "experts": (8, 16, 16)}, rule=rule)
    tree = published.placed(case, targets.parse(case.target))
    tx = published.rule(case, tree)
    jaxpr = str(jax.make_jaxpr(tx.update)(tree, jax.eval_shape(tx.init, tree), tree))
    assert ("dot_general" in jaxpr) == (rule != "norms")


@pytest.mark.skipif(
    targets.missing(targets.parse("h100:1")) is not None,
    reason="needs requirements/cuda-compiler.txt",
)
def test_a_case_is_compiled(monkeypatch, tmp_path, capsys):
    name = "column and row norms, 2048 x 5120"
    published.main(published.Config(cases=(name,), out=tmp_path))
    row = json.loads((tmp_path / "published.json").read_text())["rows"][name]
    assert row["predicted_s"] == pytest.approx(KEPT[name]["predicted_s"], rel=0.2)
    assert "dormouse-fused" in capsys.readouterr().out
