"""Momentum in eight bits on a mesh: updates, and where codes and scales lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from optax_muonplus.transforms import find_momentum
from tests.support.mesh import AUTO, EXPLICIT, P, make_mesh

pytestmark = pytest.mark.several_devices

# Shape, how the parameter is cut, and how its scales are. Shards hold whole blocks of 256, or not.
LEAVES = {
    "whole": ((16, 1024), P("a", "b"), P("a", "b")),
    "replicated": ((16, 256), P(), P(None, None)),
    "scanned": ((4, 32, 512), P(None, "a", "b"), P(None, "a", "b")),
    "cut": ((16, 512), P(None, ("a", "b")), P(None, None)),
    "cut rows": ((512, 24), P(("a", "b")), P(None, None)),
    "heads": ((256, 4, 4), P("a", "b"), P(None, "b", None)),
}
CUT = ("cut", "cut rows", "heads")
DIMS = dict.fromkeys(LEAVES, omp.MuonDimensionNumbers(-2, -1))
DIMS["heads"] = omp.MuonDimensionNumbers(0, (1, 2))


def gradients(names, seed):
    """Of each leaf the same numbers, whichever others there are."""
    return {
        name: jnp.asarray(np.random.default_rng([seed, i]).normal(size=shape), jnp.float32)
        for i, (name, (shape, *_)) in enumerate(LEAVES.items())
        if name in names
    }


def three_updates(tx, placed, names, jit_init=False):
    params = placed(gradients(names, 0))
    state = (jax.jit(tx.init) if jit_init else tx.init)(params)
    for seed in (1, 2, 3):
        updates, state = jax.jit(tx.update)(placed(gradients(names, seed)), state, params)
    return updates, find_momentum(state, as_stored=True)


def optimizer(names, **options):
    dims = {name: DIMS[name] for name in names}
    return omp.muonplus(0.1, mu_dtype="int8", muon_weight_dimension_numbers=dims, **options)


@functools.cache
def alone():
    """Updates and momentum of all leaves on one device."""
    return three_updates(optimizer(LEAVES), lambda x: x, LEAVES)


@pytest.mark.parametrize("known", [True, False], ids=["sharding", "no sharding"])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_sharded_updates_are_those_of_one_device(kind, known):
    names = [name for name in LEAVES if kind == AUTO or name not in CUT]
    mesh = make_mesh((4, 2), "ab", kind)
    wanted = {name: NamedSharding(mesh, LEAVES[name][1]) for name in names}
    options = {"sharding": wanted} if known else {}
    expected, momentum_alone = alone()
    # Under jit on Auto axes only the argument says where a state lies.
    jit_init = known and kind == AUTO
    updates, momentum = three_updates(
        optimizer(names, **options), lambda x: jax.device_put(x, wanted), names, jit_init
    )
    for name in names:
        # A number halfway between two codes may go to either.
        steps = np.abs(np.int32(momentum.codes[name]) - np.int32(momentum_alone.codes[name]))
        assert steps.max() <= 1 and steps.mean() < 1e-3
        error = np.linalg.norm(updates[name] - expected[name])
        assert error < 1e-3 * np.linalg.norm(expected[name])
        assert momentum.codes[name].sharding.is_equivalent_to(
            wanted[name], momentum.codes[name].ndim
        )
        scales = momentum.scales[name]
        where = NamedSharding(mesh, LEAVES[name][2])
        assert scales.sharding.is_equivalent_to(where, scales.ndim), scales.sharding


def test_explicit_axes_that_cut_blocks_are_refused():
    mesh = make_mesh((4, 2), "ab", EXPLICIT)
    wanted = {name: NamedSharding(mesh, LEAVES[name][1]) for name in LEAVES}
    with pytest.raises(Exception, match="not divisible by mesh axes"):  # by JAX
        optimizer(LEAVES).init(jax.device_put(gradients(LEAVES, 0), wanted))


def test_state_over_replicas():
    """ZeRO-1 cuts codes and scales; updates are those of one device."""
    mesh = make_mesh((4, 2), "ab")
    names = ["whole"]
    wanted = {"whole": NamedSharding(mesh, P(None, "b"))}
    tx = optimizer(names, sharding=wanted, state_sharding="a")
    updates, momentum = three_updates(tx, lambda x: jax.device_put(x, wanted), names, True)
    expected, _ = alone()
    error = np.linalg.norm(updates["whole"] - expected["whole"])
    assert error < 1e-3 * np.linalg.norm(expected["whole"])
    for x in (momentum.codes["whole"], momentum.scales["whole"]):
        assert x.addressable_shards[0].data.size * 8 == x.size


def test_a_module_called_scales_has_no_block_scales():
    """NorMuon's statistics of rows are sharded alike, whatever the module is called."""
    sharding = NamedSharding(make_mesh((4, 2), "ab"), P(None, "a"))
    params = {name: {"kernel": jnp.ones((16, 32))} for name in ("scales", "up")}
    init = omp.optimizer(omp.contrib.NorMuon(), 0.1, sharding=sharding).init
    state = jax.jit(init)(jax.device_put(params, sharding))
    one, other = (x.sharding for x in jax.tree.leaves(state) if x.shape == (1, 32))
    assert one == other
