"""The table that `describe` prints."""

import functools

import jax
import jax.monitoring
import jax.numpy as jnp
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
    gate_up = "8x20 muon 8x8x2 + 4x8x1 1 + 0.7071 0.354 + 0.25 1 your rule 'gate'"
    assert lines["gate_up/kernel"] == gate_up
    assert lines["moe/w"] == "3x8x32 muon 32x8x3 2 0.707 1 your rule 'moe'"
    assert lines["wte/embedding"] == "50x8 adam 1 embedding"
    assert "muon: 5 parameters, 15 matrices, 1,504 elements; adam: 2 parameters" in table
    rms = omp.describe(params, dims, norm="row", consistent_rms=0.2)
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
