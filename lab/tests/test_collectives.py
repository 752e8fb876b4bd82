"""`lab.benchmarks.collectives`: its counts of compiled programs, and the counts of our update."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from lab.benchmarks import collectives, meshes, products, trees
from lab.compiled_programs import hlo, walk
from lab.compiled_programs import products as compiled_products

MESH = "data=4,model=2"


def most_work(program):
    return walk.most_work(program, functools.partial(compiled_products.cost, program), "operations")


def count(function):
    """The work of ``function`` of its 8 x 8 shard, on a 4 x 2 mesh."""
    mesh, spec = meshes.simulated(MESH), P("data", "model")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    lowered = jax.jit(mapped).lower(jax.ShapeDtypeStruct((32, 16), jnp.float32))
    return most_work(hlo.read_program(lowered.compile()))


def one_collective_of_each_kind(x):
    """A collective of each kind, on a shard of 8 x 8 float32: 256 bytes."""
    x = jax.lax.all_to_all(x, "data", 0, 0, tiled=True)
    x = jnp.sin(jax.lax.all_gather(x, "model")).sum(0)
    x = jax.lax.psum(x, "data")
    x = jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])
    return jnp.tile(jax.lax.psum_scatter(x, "data", tiled=True), (4, 1))


RECEIVED = {
    "all-to-all": 256 * 3 // 4,
    "all-gather": 256,
    "all-reduce": 2 * 256 * 3 // 4,
    "collective-permute": 256,
    "reduce-scatter": 256 * 3 // 4,
}


def of_each_kind(times):
    return {f"{kind} f32": times * size for kind, size in RECEIVED.items()}


def test_every_kind_of_collective_is_counted_with_its_bytes():
    work = count(one_collective_of_each_kind)
    assert walk.of_kinds(work, "collectives") == {f"{kind} f32": 1 for kind in RECEIVED}
    assert walk.of_kinds(work, "received") == of_each_kind(1)
    assert walk.total(work, "operations") == 0


def test_counts_in_a_loop_are_multiplied_by_its_iterations():
    def nested(x):
        inner = functools.partial(jax.lax.fori_loop, 0, 7, lambda _, y: jnp.sin(y @ y))
        return jax.lax.fori_loop(0, 5, lambda _, y: inner(one_collective_of_each_kind(y)), x)

    work = count(nested)
    assert walk.of_kinds(work, "received") == of_each_kind(5)
    assert walk.total(work, "operations") == 5 * 7 * 2 * 8**3


def test_of_branches_and_of_a_loop_that_may_not_run_the_most_counts():
    def times(n):
        return lambda x: functools.reduce(lambda y, _: jnp.sin(y @ y), range(n), x)

    def worker(x):
        here = jax.lax.axis_index(("data", "model"))
        x = jax.lax.switch(here, [times(n) for n in range(4)], x)
        once = (here == 1, x)
        return jax.lax.while_loop(lambda s: s[0], lambda s: (False, times(10)(s[1])), once)[1]

    assert walk.total(count(worker), "operations") == (3 + 10) * 2 * 8**3


TEXT = """HloModule small, num_partitions=8

ENTRY %main (x: f32[8,4]) -> f32[8,4] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  ROOT %y = f32[8,4]{{1,0}} {}
}}
"""


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("all-gather(%x), replica_groups=<odd>, dimensions={0}", "groups in an unknown format"),
        ("all-gather(%x), replica_groups={{0,1},{2,3,4}}", "groups in an unknown format"),
        ('custom-call(%x, %x), custom_call_target="__onednn$matmul"', "custom-call"),
        ("ragged-all-to-all(%x), replica_groups={}", "ragged-all-to-all"),
    ],
)
def test_instructions_that_cannot_be_counted_raise(instruction, message):
    with pytest.raises(ValueError, match=message):
        most_work(hlo.parse(TEXT.format(instruction)))


@functools.cache
def ours(layers, **changes):
    """The figures of our update for a GPT of width 32, every matrix cut along both mesh axes."""
    config = collectives.Config(layers=layers, width=32, rivals=False, **changes)
    placed = meshes.placed(trees.shapes(config.size), meshes.simulated(config.mesh), config.spec)
    return collectives.figures(
        collectives.optimizers(config, placed)[collectives.OURS], placed, placed
    )


def even(layers):
    """Operations of the method for all matrices, over eight devices."""
    size = trees.SIZES["gpt-256"]._replace(layers=layers, width=32, feed_forward=128)
    return products.operations(size, "auto", None) / 8


@pytest.mark.parametrize("layers", [12, 24])
def test_the_update_has_two_all_to_alls_and_receives_the_fewest_bytes(layers):
    row = ours(layers)
    assert row["collectives"] == {"all-to-all f32": 2}
    assert row["received_ratio"] <= 1.15
    assert 1 <= row["operations"] / even(layers) <= 1.05


def test_matrices_that_do_not_divide_the_devices_have_an_upper_bound():
    """12 square matrices and 6 others, on 8 devices."""
    assert 1 < ours(3)["operations"] / even(3) < 2.5


def test_replicas_divide_the_work():
    row = ours(12, mesh="replica=2,data=2,model=2")
    assert sum(row["collectives"].values()) <= 4
    assert row["received_ratio"] <= 1.15 and row["operations"] / even(12) <= 1.05


def test_fewest_bytes_for_each_way_to_shard():
    shapes = trees.shapes(trees.SIZES["gpt-256"])
    mesh = meshes.simulated(MESH)
    total = 4 * 12 * 12 * 256**2
    both = meshes.fewest_bytes(meshes.placed(shapes, mesh, "data,model"))
    assert both == 2 * total / 8 * 7 / 8 and both == pytest.approx(8.26e6, rel=1e-3)
    # In four shards, on two replicas: a device works on an eighth and lacks three quarters of that.
    rows = meshes.fewest_bytes(meshes.placed(shapes, mesh, "data"))
    assert rows == total / 8 * 3 / 4 + total / 4 * 7 / 8
    assert meshes.fewest_bytes(meshes.placed(shapes, mesh, "-")) == total * 7 / 8


def test_experts_are_matrices_of_their_own():
    size = trees.Size(16, 2, 24, gated=True, experts=8)
    assert products.matrix_shapes(size) == {(16, 16): 8, (16, 8): 2, (16, 24): 32, (24, 16): 16}
    placed = meshes.placed(trees.shapes(size), meshes.simulated("data=8"), "data")
    scanned = trees.scanned(placed)
    assert meshes.described(scanned) == [
        "1 of 2 x 8 x 24 x 16, cut along nothing and nothing and data and nothing",
        "2 of 2 x 8 x 16 x 24, cut along nothing and nothing and data and nothing",
        "4 of 2 x 16 x 16, cut along nothing and data and nothing",
        "1 of 2 x 16 x 8, cut along nothing and data and nothing",
    ]
    up = trees.dimension_numbers(scanned)["blocks"]["experts"]["up"]["kernel"]
    assert (up.reduction_axis, up.output_axis) == ((2,), (3,))
    assert meshes.fewest_bytes(scanned) == meshes.fewest_bytes(placed)
