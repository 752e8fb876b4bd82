"""The rivals' layouts, state, dtypes, partition, sharding and arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from optax_muonplus import muonplus
from tests.support.batches import layers, temporary_bytes
from tests.support.contrib import (
    NAMES,
    assert_sharded_is_alone,
    build,
    decay,
    rule_of,
    run,
    trees,
)


@functools.cache  # two tests compare with these
def decayed(name):
    """Parameters after each step, with weight decay."""
    return run(build(name, **decay(name, 0.1)), *trees())[0]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_output_units_however_they_are_stored(name):
    params, grads = trees()
    upright = {k: MuonDimensionNumbers(1, 0) for k in params}
    stored = decayed(name)
    turned = jax.tree.map(np.transpose, params), [jax.tree.map(np.transpose, g) for g in grads]
    tx = build(name, weight_dimension_numbers=upright, **decay(name, 0.1))
    other, _ = run(tx, *turned)
    for key in params:
        np.testing.assert_allclose(stored[-1][key], other[-1][key].T, rtol=0, atol=3e-5)


ALONE = {"a": (8, 6), "b": (8, 10), "c": (8, 6), "left": (6, 8), "right": (10, 8)}
TOGETHER = {
    "stack": MuonDimensionNumbers(1, 2),
    "fused": omp.MatrixSpec(0, 1, split_sizes=(6, 10)),
    # Along the input side: each block has rows, and means of them, of its own.
    "tall": omp.MatrixSpec(0, 1, split_sizes=(6, 10), split_axis=0),
}


@pytest.mark.parametrize("name", NAMES)
def test_batch_slices_and_fused_blocks_are_separate_matrices(name):
    params, grads = trees(shapes=ALONE)
    alone, _ = run(build(name), params, grads)

    def together(tree):
        return {
            "stack": np.stack([tree["a"], tree["c"]]),
            "fused": np.concatenate([tree["a"], tree["b"]], axis=1),
            "tall": np.concatenate([tree["left"], tree["right"]]),
        }

    tx = build(name, weight_dimension_numbers=TOGETHER)
    found, _ = run(tx, together(params), [together(g) for g in grads])
    for key, expected in together(alone[-1]).items():
        np.testing.assert_allclose(found[-1][key], expected, atol=3e-6, err_msg=key)


# Numbers for each entry and for each row; others have the momentum alone.
STATES = {"normuon": (1, 1), "adamuon": (2, 0)}


@pytest.mark.parametrize("name", NAMES)
def test_size_of_the_state(name):
    buffers, rows = STATES.get(name, (1, 0))
    params, _ = trees(shapes={"up": (12, 20)})
    state = build(name).init(params)
    sizes = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert sizes == buffers * 12 * 20 + rows * 20  # 20 output units
    half = build(name, mu_dtype=jnp.bfloat16).init(params)
    dtypes = [x.dtype.name for x in jax.tree.leaves(half) if x.ndim and x.size == 240]
    assert dtypes == ["bfloat16", "float32"][:buffers]  # no squares in the momentum's dtype


@pytest.mark.parametrize("name", NAMES)
def test_the_first_state_can_be_donated(name):
    params, (grad, *_) = trees()
    update = jax.jit(build(name).update, donate_argnums=1)
    jax.block_until_ready(update(grad, build(name).init(params), params))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_parameters(name):
    params, grads = jax.tree.map(jnp.asarray, trees(dtype=jnp.bfloat16))
    tx = build(name)
    state = tx.init(params)
    updates, after = jax.eval_shape(tx.update, grads[0], state, params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


@pytest.mark.parametrize("name", NAMES)
def test_wider_gradients_leave_the_state_as_it_is(name):
    """So that ``jax.lax.scan`` takes it."""
    with jax.enable_x64(True):
        params, (grad, *_) = trees()
        tx = build(name)
        state = tx.init(params)
        wide = jax.tree.map(lambda x: x.astype(np.float64), grad)
        _, after = jax.eval_shape(tx.update, wide, state, params)
        assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


PARTITIONED = {
    "wte": {"embedding": np.ones((5, 4), np.float32)},
    "up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)},
}
OTHERS = optax.nadamw(0.3, b2=0.99, weight_decay=0.1)


def uneven(params):
    """Gradients of which no norm is that of another row."""
    return jax.tree.map(
        lambda x: np.linspace(-1, 2, x.size, dtype=x.dtype).reshape(x.shape) ** 3, params
    )


@functools.cache
def partitioned_by_muonplus():
    tx = muonplus(0.05, others=OTHERS)
    return run(tx, PARTITIONED, [uneven(PARTITIONED)])[0]


@pytest.mark.parametrize("name", NAMES)
def test_same_partition_as_muonplus(name):
    grads = uneven(PARTITIONED)
    ours, _ = run(build(name, others=OTHERS), PARTITIONED, [grads])
    theirs = partitioned_by_muonplus()
    for path in (("wte", "embedding"), ("up", "bias")):
        np.testing.assert_array_equal(ours[0][path[0]][path[1]], theirs[0][path[0]][path[1]])


LARGE = {"up": (16, 32), "down": (32, 16)}


OF_LONGER_SIDES = {"normuon": {"side": "long"}}  # rows of one matrix, columns of the other


@pytest.mark.several_devices
@pytest.mark.parametrize(
    "name, kind",
    [
        *((name, AxisType.Auto) for name in NAMES),
        # Those with a state of their own, a loop of their own, and a projection by parameters.
        *((name, AxisType.Explicit) for name in (*STATES, "aurora", "mano")),
    ],
)
def test_sharded_parameters_get_the_update_of_one_device(name, kind):
    options = OF_LONGER_SIDES.get(name, {}) if kind == AxisType.Explicit else {}
    specs = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}
    make = functools.partial(build, name, **options)
    assert_sharded_is_alone(make, *trees(shapes=LARGE), specs, kind, (4, 2))


@pytest.mark.parametrize("name", NAMES)
def test_injected_hyperparameters(name):
    params, grads = trees()
    rule = functools.partial(omp.optimizer, rule_of(name))
    make = optax.inject_hyperparams(omp.contrib.hyperball if name == "hyperball" else rule)
    injected, state = run(make(learning_rate=0.05, **decay(name, 0.1)), params, grads)
    assert state.hyperparams.keys() - {"weight_decay"} == {"learning_rate"}
    plain = decayed(name)
    for key in params:
        np.testing.assert_allclose(injected[-1][key], plain[-1][key], atol=2e-5)


@pytest.mark.parametrize("name", ["hyperball", "mano"])
def test_rules_that_need_parameters_say_so(name):
    params, grads = trees()
    tx = build(name)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads[0], tx.init(params))


@pytest.mark.parametrize("name", ["normuon", "adamuon", "mano"])
def test_bfloat16_updates_are_rounded_once_at_the_end(name):
    """What the rules do behind the polar factor is done in float32."""
    params, (grad, *_) = trees()
    narrow, narrow_grad = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (params, grad))
    wide, wide_grad = jax.tree.map(lambda x: x.astype(jnp.float32), (narrow, narrow_grad))
    tx = omp.matrix_chain(rule_of(name, mu_dtype="float32"))
    rounded, _ = tx.update(narrow_grad, tx.init(narrow), narrow)
    exact, _ = tx.update(wide_grad, tx.init(wide), wide)
    for key in params:
        np.testing.assert_array_equal(rounded[key], exact[key].astype(jnp.bfloat16))


@pytest.mark.several_devices
@pytest.mark.parametrize("sizes", [(8, 4, 4), (4,) * 6])
def test_blocks_that_cross_shards_of_an_explicit_mesh_are_cut_one_by_one(sizes):
    """Types forbid to make a batch of six out of 24 on four devices."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    dims = omp.MatrixSpec(0, 1, split_sizes=sizes)
    tx = omp.optimizer(omp.contrib.NorMuon(), 0.1, weight_dimension_numbers=dims)
    update = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])
    grad = jnp.sin(jnp.arange(16.0 * sum(sizes)).reshape(16, -1) ** 2)
    with jax.set_mesh(mesh):
        found = update(jax.device_put(grad, NamedSharding(mesh, P("b", "a"))))
    np.testing.assert_allclose(found, update(grad), atol=1e-5)


@pytest.mark.cpu_program
def test_normuon_copies_no_polar_factor():
    """It takes the memory that Muon with a decay does; a copy would take as much again."""
    tree = layers(6)
    muon = temporary_bytes(omp.muon(0.1, weight_decay=0.1), tree, donated=(1,))
    assert temporary_bytes(build("normuon"), tree, donated=(1,)) < 1.1 * muon
