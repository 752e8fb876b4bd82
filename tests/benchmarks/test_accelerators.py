"""`benchmarks.accelerators`: targets, rows in processes of their own, and an H100's compiler."""

import functools
import json
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from benchmarks import accelerator_row, accelerators, meshes, parity, trees
from benchmarks.compiled import compile_update
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


def test_every_row_makes_its_optimizer():
    sharding = NamedSharding(meshes.simulated("data=8"), P("data"))
    tree = {"q": {"kernel": jax.ShapeDtypeStruct((16, 16), jnp.bfloat16, sharding=sharding)}}
    for name in accelerator_row.ROWS:
        if name == accelerator_row.MAXTEXT:
            continue  # not installed here
        accelerator_row.optimizer(name, tree).init(
            {"q": {"kernel": jnp.ones((16, 16), jnp.bfloat16)}}
        )


AS_OPTAX = {"compute_dtype": "bfloat16", **parity.AS_OPTAX}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("omp.muonplus:bfloat16", omp.muonplus(0.02, **AS_OPTAX)),
        (
            "omp.muonplus:bfloat16:long:matched",
            omp.muonplus(0.02, norm="long", match_frobenius=True, **AS_OPTAX),
        ),
        (
            "omp.contrib.normuon:bfloat16",
            omp.contrib.normuon(
                0.02,
                omp.contrib.NorMuon(polar_factor=omp.polar.Orthogonalize(compute_dtype="bfloat16")),
            ),
        ),
        ("optax.adamw", optax.adamw(0.001)),
    ],
)
def test_a_row_has_the_update_that_its_name_says(name, expected):
    place = NamedSharding(one_device(), P())
    tree = {"up": {"kernel": jax.ShapeDtypeStruct((16, 48), jnp.float32, sharding=place)}}
    params = {"up": {"kernel": jax.random.normal(jax.random.key(0), (16, 48))}}
    updates = [tx.update(params, tx.init(params), params)[0]
               for tx in (accelerator_row.optimizer(name, tree), expected)]  # fmt: skip
    found, correct = (x["up"]["kernel"] for x in updates)
    assert jnp.array_equal(found, correct)


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


def test_stacks_are_stored_row_by_row_and_results_like_them():
    for leaf in jax.tree.leaves(meshes.row_by_row(on_one_device(scanned=True))):
        order = None if leaf.ndim < 3 else Layout((0, 1, 2))
        assert leaf.format.layout == order
    # Results, in an order that is not the compiler's choice on a CPU.
    order = Format(Layout((0, 2, 1)), NamedSharding(one_device(), P()))
    tree = {"up": {"kernel": jax.ShapeDtypeStruct((3, 16, 64), jnp.bfloat16, sharding=order)}}
    tx = omp.muonplus(0.02, layer_axes={"up": 0})
    program = compile_update(tx, tree, stored_alike=True).program
    updates, state = program.output_formats
    for stacks in (program.input_formats[0][0], updates, omp.transforms.find_momentum(state).mu):
        (stack,) = jax.tree.leaves(stacks)
        assert stack.layout.major_to_minor == (0, 2, 1)


class MaxTextNumbers(NamedTuple):
    reduction_axis: int
    output_axis: int
    sharding: object = None


def test_maxtext_gets_matrices_with_their_shardings(monkeypatch):
    module = types.SimpleNamespace(
        MuonDimensionNumbers=MaxTextNumbers, muon=lambda *_, **given: given
    )
    monkeypatch.setitem(sys.modules, "maxtext.optimizers.muon", module)
    shapes = trees.shapes(trees.Size(16, 3, 64, gated=False))
    tree = trees.scanned(meshes.placed(shapes, meshes.simulated("data=8"), "data"))
    given = accelerator_row.optimizer(accelerator_row.MAXTEXT, tree)
    assert given["use_all_to_all"]
    blocks = given["muon_weight_dimension_numbers"]["blocks"]
    up = tree["blocks"]["up"]["kernel"]
    assert up.shape == (3, 16, 64) and up.sharding.spec == P(None, "data", None)
    assert blocks["up"]["kernel"] == ((1,), (2,), up.sharding)
    assert blocks["norm_1"]["scale"] is None


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
        # Neither matrices nor their momentum are transposed.
        assert ours["kernels_by_kind"].get("moves", 0) == 0
        assert ours["temporary_bytes"] > 0 and ours["roofline_s"] > 0
        assert "Nothing was run" in result["assumptions"]
