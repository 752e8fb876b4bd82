"""A tree of sharded parameters in many layouts, meshes of eight devices, and two steps on them."""

import contextlib
import functools
import math

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_muonplus as omp
from tests.support.trees import random_like

P = PartitionSpec
D = 16
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# Name: shape, and for mesh axes a and b how it is cut. Numbers of matrices that divide no mesh;
# tall, wide, square, stored either way, stacked over layers and experts, fused, in two dtypes.
LEAVES = {
    "q/kernel": (shape(D, D), lambda a, b: P(a, b)),
    "k/kernel": (shape(D, D), lambda a, b: P(b, a)),
    "o/kernel": (shape(D, D), lambda a, b: P(None, (a, b))),
    "wo/weight": (shape(D, D), lambda a, b: P(a, b)),
    "up/kernel": (shape(D, 4 * D), lambda a, b: P(a, b)),
    "up2/kernel": (shape(D, 4 * D), lambda a, b: P(a, b)),
    "down/kernel": (shape(4 * D, D), lambda a, b: P(b, a)),
    "down2/kernel": (shape(4 * D, D), lambda a, b: P((b, a))),
    "wide/weight": (shape(D, 4 * D), lambda a, b: P(a, b)),
    "one_way/kernel": (shape(D, 4 * D), lambda a, b: P(None, b)),
    "other_way/kernel": (shape(4 * D, D), lambda a, b: P(None, a)),
    "replicated/kernel": (shape(D, D), lambda a, b: P()),
    "alone/kernel": (shape(D, 3 * D), lambda a, b: P(a)),
    "scanned/kernel": (shape(5, D, 4 * D), lambda a, b: P(None, a, b)),
    "experts/kernel": (shape(8, 3, D, D), lambda a, b: P(a, None, None, b)),
    "stacked/kernel": (shape(8, D, 4 * D), lambda a, b: P((a, b))),
    "query/kernel": (shape(D, 8, 2), lambda a, b: P(a, b)),
    "fused/kernel": (shape(D, 3 * D), lambda a, b: P(a, b)),
    "heads/kernel": (shape(D, 2 * D), lambda a, b: P(a, b)),
    "narrow/kernel": (shape(D, D, dtype=jnp.bfloat16), lambda a, b: P(a, b)),
    "embed/embedding": (shape(4 * D, D), lambda a, b: P(a, b)),
    "norm/scale": (shape(D), lambda a, b: P(a)),
}
RULES = [
    ("scanned|stacked", omp.MuonDimensionNumbers(-2, -1)),
    ("experts", omp.MuonDimensionNumbers(-1, -2)),
    ("heads", omp.MatrixSpec(0, 1, split_sizes=(4,) * 6 + (8,))),
    ("fused", omp.MatrixSpec(0, 1, split_sizes=(D, D, D))),
]
DIMS = functools.partial(omp.muon_dimension_numbers, rules=RULES)


def nested(flat):
    """``{"q/kernel": x}`` as ``{"q": {"kernel": x}}``."""
    tree = {}
    for name, value in flat.items():
        module, leaf = name.split("/")
        tree.setdefault(module, {})[leaf] = value
    return tree


TREE = nested({name: leaf for name, (leaf, _) in LEAVES.items()})
# Stored either way, cut along one axis and two, stacked, fused, no matrix: for the meshes on which
# the whole tree, whose programs are slow to trace, would show nothing new.
FEW = ("q", "o", "up", "down", "wide", "scanned", "experts", "heads", "fused", "embed")


def modules_of(tree, modules):
    return {module: tree[module] for module in modules}


def make_mesh(sizes, names, types=AUTO):
    names = tuple(names)
    types = (types,) * len(names) if isinstance(types, AxisType) else types
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def shardings(mesh, a, b):
    """Shardings of all leaves; an axis that is None is one that the mesh does not have."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def possible(entry):
        if not isinstance(entry, tuple):
            return entry
        return tuple(sorted(filter(None, entry), key=lambda axis: kinds[axis] != EXPLICIT))

    specs = {name: P(*map(possible, cut(a, b))) for name, (_, cut) in LEAVES.items()}
    return nested({name: NamedSharding(mesh, spec) for name, spec in specs.items()})


@functools.cache
def gradients():
    return random_like(TREE)


@functools.cache
def alone(**options):
    """Updates and state of one device, after two steps."""
    return two_steps(omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, **options), gradients())


def two_steps(tx, grads):
    update = jax.jit(tx.update)
    place = jax.tree.leaves(grads)[0].sharding
    with jax.set_mesh(place.mesh) if isinstance(place, NamedSharding) else contextlib.nullcontext():
        # Under jit the state lies where an update leaves it: one compilation serves both.
        state = jax.jit(tx.init)(grads)
    _, state = update(grads, state, grads)
    return update(jax.tree.map(lambda g: g + g * g, grads), state, grads)


def lowered_update(tx, tree, wanted):
    """The update as a program, without any array."""
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, wanted
    )
    state = jax.eval_shape(tx.init, params)
    placed = jax.jit(tx.init).lower(params).compile().output_shardings
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
    )
    return jax.jit(tx.update).lower(params, state, params)


def assert_same(found, expected, wanted=None):
    """Equal to the rounding of sums in another order; bfloat16 to one of its units."""
    tolerance = {jnp.dtype(jnp.float32): 4e-6, jnp.dtype(jnp.bfloat16): 2e-3}
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert x.dtype == y.dtype
        atol = tolerance.get(x.dtype, 0)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            np.asarray(x, np.float32),
            np.asarray(y, np.float32),
            atol=atol,
            rtol=atol,
            err_msg=name,
        )
    if wanted is not None:
        for x, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.shape, x.sharding)


MESHES = {
    "fsdp": ((8,), ("a",), "a", None, AUTO),
    "fsdp, explicit": ((8,), ("a",), "a", None, EXPLICIT),
    "fsdp x tensor": ((4, 2), ("a", "b"), "a", "b", AUTO),
    "fsdp x tensor, explicit": ((4, 2), ("a", "b"), "a", "b", EXPLICIT),
    "mixed": ((4, 2), ("a", "b"), "a", "b", (AUTO, EXPLICIT)),
    "with replicas": ((2, 2, 2), ("r", "a", "b"), "a", "b", AUTO),
    "with replicas, explicit": ((2, 2, 2), ("r", "a", "b"), "a", "b", EXPLICIT),
    "only replicas": ((4, 2), ("r", "s"), None, None, AUTO),
    "only replicas, explicit": ((8,), ("r",), None, None, EXPLICIT),
    "axes of size 1": ((1, 8, 1), ("r", "a", "b"), "a", "b", EXPLICIT),
    "one device": ((1, 1), ("a", "b"), "a", "b", EXPLICIT),
}


def small():
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({"q": {"kernel": shape(D, D)}, "k": {"kernel": shape(D, D)}})
    sharding = NamedSharding(mesh, P("a", "b"))
    return jax.device_put(grads, sharding), sharding


def grads_like(sharding):
    return {"q": {"kernel": sharding}, "k": {"kernel": sharding}}
