"""`benchmarks.collectives`: its counts of compiled programs, and the counts of our update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import collectives, meshes, products, trees
from examples.compiled_programs import counts, hlo
from examples.compiled_programs.collectives import lowered_bytes

MESH = "data=4,model=2"


def lowered(function, dtype=jnp.float32):
    """The program of ``function`` of its 8 x 8 shard, on a 4 x 2 mesh."""
    mesh, spec = meshes.simulated(MESH), P("data", "model")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((32, 16), dtype))


def count(function):
    return counts.count(hlo.read_program(lowered(function).compile()))


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
RETURNED = 256 + 2 * 256 + 256 + 256 + 256 // 4


def test_every_kind_of_collective_is_counted_with_its_bytes():
    (device,) = count(one_collective_of_each_kind)
    assert device.collectives == dict.fromkeys(RECEIVED, 1)
    assert device.received == RECEIVED
    assert device.returned == RETURNED
    assert (device.in_loops, device.operations) == (0, 0)


def test_counts_in_a_loop_are_multiplied_by_its_iterations():
    def nested(x):
        inner = functools.partial(jax.lax.fori_loop, 0, 7, lambda _, y: jnp.sin(y @ y))
        return jax.lax.fori_loop(0, 5, lambda _, y: inner(one_collective_of_each_kind(y)), x)

    (device,) = count(nested)
    assert device.collectives == dict.fromkeys(RECEIVED, 5)
    assert device.received == {kind: 5 * size for kind, size in RECEIVED.items()}
    assert device.returned == 5 * RETURNED
    assert device.in_loops == 5 * len(RECEIVED)
    assert device.operations == 5 * 7 * 2 * 8**3


def test_a_lowered_program_tells_the_bytes_that_it_asks_for():
    """In its own dtypes, in loops too, and whichever way its text names the devices of a group."""
    once, asked = one_collective_of_each_kind, sum(RECEIVED.values())
    assert lowered_bytes(lowered(once)) == asked
    assert lowered_bytes(lowered(once, jnp.bfloat16)) == asked // 2
    five_times = functools.partial(jax.lax.fori_loop, 0, 5, lambda _, x: once(x))
    assert lowered_bytes(lowered(five_times)) == 5 * asked
    assert lowered_bytes(lowered(jnp.sin)) == 0


def test_a_branch_chosen_by_device_id_is_followed_on_each_device():
    table = np.array([3, 0, 1, 0, 0, 2, 0, 7])  # 7 is beyond the last branch

    def times(n):
        return lambda x: functools.reduce(lambda y, _: jnp.sin(y @ y), range(n), x)

    def worker(x):
        here = jnp.asarray(table)[jax.lax.axis_index(("data", "model"))]
        x = jax.lax.switch(here, [times(n) for n in range(4)], x)
        return jax.lax.cond(here == 1, times(10), times(0), x)

    expected = [3, 0, 11, 0, 0, 2, 0, 3]
    assert [x.operations for x in count(worker)] == [n * 2 * 8**3 for n in expected]


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
        counts.count(hlo.parse(TEXT.format(instruction)))


@functools.cache
def ours(layers, **changes):
    """The figures of our update for a GPT of width 32, every matrix cut along both mesh axes."""
    config = collectives.Config(layers=layers, width=32, rivals=False, **changes)
    placed = meshes.placed(trees.shapes(config.size), meshes.simulated(config.mesh), config.spec)
    rows = collectives.optimizers(config, placed)
    operations = collectives.method_operations(config, collectives.OURS)
    return collectives.figures(rows[collectives.OURS], placed, placed, operations)


@pytest.mark.parametrize("layers", [12, 24])
def test_the_update_has_two_all_to_alls_and_receives_the_fewest_bytes(layers):
    row = ours(layers)
    assert row["collectives"] == {"all-to-all": 2}
    assert row["collectives_in_loops"] == 0
    assert row["received_ratio"] <= 1.15
    assert row["lowered_bytes"] == row["received_bytes"]
    assert 1 <= row["operations_ratio"] <= 1.05


def test_matrices_that_do_not_divide_the_devices_are_each_worked_on_once():
    row = ours(3)  # 12 square matrices and 6 others, on 8 devices
    done = sum(count * work for work, count in row["operations_of_devices"].items())
    even = row["operations"] / row["operations_ratio"]
    assert len(row["operations_of_devices"]) > 1
    assert done == pytest.approx(8 * even, rel=1e-6) and row["operations"] > even


def test_replicas_divide_the_work():
    row = ours(12, mesh="replica=2,data=2,model=2")
    assert sum(row["collectives"].values()) <= 4 and row["collectives_in_loops"] == 0
    assert row["received_ratio"] <= 1.15 and row["operations_ratio"] <= 1.05


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


# Mixtures of experts: their matrices, how they are spread, and the fewest bytes


SIZE = trees.Size(16, 2, 24, gated=True, experts=8)


def placed(mesh, spec, experts="-", scanned=False):
    tree = meshes.placed(trees.shapes(SIZE), meshes.simulated(mesh), spec, experts)
    return trees.scanned(tree) if scanned else tree


def test_experts_are_matrices_of_their_own():
    assert products.matrix_shapes(SIZE) == {(16, 16): 8, (16, 8): 2, (16, 24): 32, (24, 16): 16}
    assert meshes.described(placed("data=8", "data", scanned=True)) == [
        "1 of 2 x 8 x 24 x 16, cut along nothing and nothing and data and nothing",
        "2 of 2 x 8 x 16 x 24, cut along nothing and nothing and data and nothing",
        "4 of 2 x 16 x 16, cut along nothing and data and nothing",
        "1 of 2 x 16 x 8, cut along nothing and data and nothing",
    ]
    scanned = placed("data=8", "data", scanned=True)["blocks"]
    up = trees.dimension_numbers({"blocks": scanned})["blocks"]["experts"]["up"]["kernel"]
    assert (up.reduction_axis, up.output_axis) == ((2,), (3,))


def test_experts_that_are_whole_need_no_bytes():
    experts = 4 * 2 * 8 * 3 * 16 * 24
    others = 4 * 2 * (4 * 16 * 16 + 16 * 8)

    def sent(total, groups=1):
        """The bytes of matrices in shards, which the devices of each group share."""
        return 2 * total / 8 * (1 - groups / 8)

    assert meshes.fewest_bytes(placed("expert=8", "expert", "expert")) == sent(others)
    both = "expert=2,data=4", "data,expert", "expert"
    assert meshes.fewest_bytes(placed(*both)) == sent(others) + sent(experts, groups=2)
    assert meshes.fewest_bytes(placed(*both, scanned=True)) == sent(others) + sent(experts, 2)
    assert meshes.fewest_bytes(placed("data=8", "-")) == (others + experts) * 7 / 8
