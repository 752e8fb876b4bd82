"""`benchmarks.accelerators`: targets, rows in processes of their own, and an H100's compiler."""

import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from benchmarks import accelerator_row, accelerators, parity, trees
from examples.compiled_programs import targets


@pytest.mark.parametrize(
    ("text", "kind", "devices"),
    [("h100:1", "h100", 1), ("h100:64", "h100", 64), ("v5e:4x4", "v5e", 16), ("v5e:1", "v5e", 1)],
)
def test_targets_are_a_kind_and_a_number_or_layout(text, kind, devices):
    target = targets.parse(text)
    assert (target.kind, target.devices) == (kind, devices)


@pytest.mark.parametrize("text", ["h100", "h100:0", "h100:12", "h100:2x2", "b100:1", "v5e:"])
def test_other_targets_raise(text):
    with pytest.raises(ValueError, match="got"):
        targets.parse(text)


def test_the_environment_of_a_row_has_no_settings_of_other_programs(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "cache")
    environment = targets.environment(targets.parse("v5e:16x16"))
    assert not {"XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"} & environment.keys()
    assert environment["TPU_ACCELERATOR_TYPE"] == "v5litepod-256"


def one_device():
    return jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])


def test_a_row_has_the_update_that_its_name_says():
    place = NamedSharding(one_device(), P())
    tree = {"up": {"kernel": jax.ShapeDtypeStruct((16, 48), jnp.float32, sharding=place)}}
    params = {"up": {"kernel": jax.random.normal(jax.random.key(0), (16, 48))}}
    as_optax = {"compute_dtype": "bfloat16", **parity.AS_OPTAX}
    for name, expected in {
        "omp.muon:bfloat16": omp.muon(0.02, **as_optax),
        "omp.muonplus:bfloat16": omp.muonplus(0.02, **parity.COL_ROW, **as_optax),
        "omp.muonplus:bfloat16:row_col:matched": omp.muonplus(0.02, **parity.ROW_COL, **as_optax),
        "omp.muonplus:bfloat16:default": omp.muonplus(0.02, compute_dtype="bfloat16"),
        "optax.adamw": optax.adamw(0.001),
    }.items():
        found, correct = (
            tx.update(params, tx.init(params), params)[0]["up"]["kernel"]
            for tx in (accelerator_row.optimizer(name, tree), expected)
        )
        assert jnp.array_equal(found, correct), name


def test_rows_that_are_not_known_are_refused_before_compiling():
    with pytest.raises(SystemExit, match="clumsy is none of bfloat16"):
        accelerators.main(accelerators.Config(rows=("omp.muonplus:clumsy",)))
    with pytest.raises(ValueError, match=r"there is no row omp\.soap"):
        accelerator_row.optimizer("omp.soap", {})


def on_one_device(scanned):
    place = NamedSharding(one_device(), P())
    tree = trees.shapes(trees.Size(16, 3, 64, gated=True))
    tree = trees.scanned(tree) if scanned else tree
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


@pytest.mark.parametrize("scanned", [False, True])
def test_heads_of_separate_and_scanned_layers_are_cut(scanned):
    tree = on_one_device(scanned)
    rule = functools.partial(accelerator_row.optimizer, "omp.muonplus:bfloat16", tree)
    jax.eval_shape(rule(head_size=4).init, tree)
    with pytest.raises(ValueError, match="head_size 5 does not divide 16 outputs"):
        jax.eval_shape(rule(head_size=5).init, tree)


@pytest.mark.skipif(
    targets.missing(targets.parse("h100:1")) is not None,
    reason="needs requirements/cuda-compiler.txt",
)
def test_an_update_is_compiled_for_an_h100(tmp_path):
    rows = ("optax.contrib.muon", "omp.muonplus:bfloat16")
    for scanned in (False, True):
        config = accelerators.Config(
            layers=2, width=64, scanned=scanned, rows=rows, out=tmp_path / str(scanned)
        )
        accelerators.main(config)
        (file,) = (tmp_path / str(scanned)).iterdir()
        result = json.loads(file.read_text())
        theirs, ours = (result["rows"][name] for name in rows)
        # Per layer 15 n^3 for each of four squares, 45 n^3 for each of two 1:4; two operations.
        assert theirs["operations_of_products"] == 2 * 2 * (4 * 15 + 2 * 45) * 64**3
        # Gram on 1:4: 3 segments of 2 products with the long side, 5 squares, 3 others.
        assert ours["operations_of_products"] == 2 * 2 * (4 * 15 + 2 * (3 * 8 + 5 + 6)) * 64**3
        assert 0 < ours["kernels"] < theirs["kernels"]
        assert 0 < ours["kernels_beside_products"] < ours["kernels"]
        # Neither matrices nor their momentum are transposed.
        assert ours["kernels_by_kind"].get("moves", 0) == 0
        assert ours["temporary_bytes"] > 0 and ours["roofline_s"] > 0
        assert "Nothing was run" in result["assumptions"]
