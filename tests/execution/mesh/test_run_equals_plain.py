"""Whatever runs the functions, updates are those of the reference `run_plain` on one device.

Each case is one program for a tree that has every shape and layout: tall, wide and square matrices,
stored either way, stacked over layers and experts, fused, and in two dtypes.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus._execution.mesh import plan as planning
from optax_muonplus.matrices import Normalize, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import DualNorm, Momentum, find_momentum, run_plain
from tests.support.batches import everywhere_mapped, everywhere_stacked, play
from tests.support.mesh import (
    DIMS,
    EXPLICIT,
    FEW,
    MESHES,
    TREE,
    D,
    gradients,
    make_mesh,
    modules_of,
    shardings,
)

MATRICES = tuple(name for name in TREE if name not in ("embed", "norm"))
SOME = (*(name for name in FEW if name in MATRICES), "wo")
# Cut along both axes on meshes of either type and of both; the other meshes have a few leaves.
ALL_LEAVES = ("one device", "fsdp x tensor", "mixed", "with replicas, explicit")

OPTIONS = {
    "defaults": {},
    "matched": {"norm": "row_col", "match_frobenius": True},
    "col, adaptive": {"norm": "col", "adaptive": True},
    "columns first": {"norm": "none", "preconditioning": "aol", "polar": "newton_schulz"},
    "rows first": {"norm": "none", "preconditioning": "aol", "ns_coeffs": "cubic"},
    "own function": {"polar": lambda x: x / (1 + jnp.sum(x * x, axis=-1, keepdims=True))},
    "int8": {"mu_dtype": "int8"},
    "int8, adaptive": {"mu_dtype": "int8", "adaptive": True},
}


def chain(norm="col_row", match_frobenius=False, adaptive=False, mu_dtype=None, **options):
    run = {"run": options.pop("run")} if "run" in options else {}
    where = omp.Matrices(weight_dimension_numbers=DIMS, sharding=options.pop("sharding", None))
    return omp.matrix_chain(
        Momentum(mu_dtype=mu_dtype),
        Orthogonalize(**options, compute_dtype="float32"),
        Normalize(norm, match_frobenius=match_frobenius),
        *([DualNorm()] if adaptive else []),
        ScaleByShape(),
        where=where,
        **run,
    )


def updated(tx, grads, mesh=None):
    """The second update, and the momentum behind it."""
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        state = jax.jit(tx.init)(grads)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(grads, state)
    return updates, find_momentum(state, as_stored=True)[0]


@functools.cache
def reference(name):
    grads = modules_of(gradients(), MATRICES if name == "defaults" else SOME)
    return updated(chain(run=run_plain, **OPTIONS[name]), grads)


def assert_equal(found, options, modules):
    """To 1e-5 of the largest entry, and in bfloat16 to one unit of it.

    The reference iterates by the definition: in five steps its rounding of 6e-8 grows a hundredfold
    on the way to small singular values, and other products round differently.
    """
    expected = modules_of(reference(options)[0], modules)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert x.dtype == y.dtype
        x, y, units = np.float32(x), np.float32(y), {jnp.bfloat16: 2**-8}.get(y.dtype.type, 1e-5)
        atol = units * max(1, np.abs(y).max())
        np.testing.assert_allclose(x, y, atol=atol, rtol=0, err_msg=jax.tree_util.keystr(path))


def check(options, mesh_name, modules):
    sizes, names, a, b, types = MESHES[mesh_name]
    mesh = make_mesh(sizes, names, types)
    wanted = modules_of(shardings(mesh, a, b), modules)
    tx = chain(sharding=wanted if types != EXPLICIT else None, **OPTIONS[options])
    found, momentum = updated(tx, jax.device_put(modules_of(gradients(), modules), wanted), mesh)
    assert_equal(found, options, modules)
    for tree in (found, momentum):
        for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)


# A loop over matrices, stacks, and matrices that are padded one by one in stacks; stacks stop at
# three squares, so that a leaf is cut.
MACHINES = {
    "cpu": lambda monkeypatch: play(monkeypatch, "cpu"),
    "gpu": everywhere_stacked,
    "tpu": everywhere_mapped,
    "gpu, three": lambda monkeypatch: everywhere_stacked(monkeypatch, 12 * D * D),
    "tpu, three": lambda monkeypatch: everywhere_mapped(monkeypatch, 12 * D * D, 24),
}


@pytest.mark.parametrize(
    ("options", "machine"),
    [
        *(("defaults", machine) for machine in MACHINES),
        *((name, x) for name in ("col, adaptive", "int8") for x in ("cpu", "gpu", "tpu")),
        *((name, x) for name in ("own function", "rows first") for x in MACHINES),
    ],
)
def test_one_device(options, machine, monkeypatch):
    MACHINES[machine](monkeypatch)
    modules = MATRICES if (options, machine[3:]) == ("defaults", "") else SOME
    found, _ = updated(chain(**OPTIONS[options]), modules_of(gradients(), modules))
    assert_equal(found, options, modules)


def test_without_jit():
    grads = modules_of(gradients(), SOME)
    tx = chain()
    state = tx.init(grads)
    for _ in range(2):
        found, state = tx.update(grads, state)
    assert_equal(found, "defaults", SOME)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh(mesh):
    check("defaults", mesh, MATRICES if mesh in ALL_LEAVES else SOME)


@pytest.mark.parametrize("machine", ["cpu", "gpu", "tpu"])
def test_arrays_made_before_an_explicit_mesh_was_set(machine, monkeypatch):
    """Without a momentum, which would have the mesh's types."""
    MACHINES[machine](monkeypatch)
    grads = modules_of(gradients(), SOME)

    def normalized(**options):
        where = omp.Matrices(weight_dimension_numbers=DIMS)
        tx = omp.matrix_chain(Normalize("row"), where=where, **options)
        return jax.jit(lambda x: tx.update(x, tx.init(x))[0])(grads)

    expected = normalized(run=run_plain)
    with jax.set_mesh(make_mesh((4, 2), ("a", "b"), EXPLICIT)):
        found = normalized()
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("machine", ["cpu", "gpu", "tpu"])
def test_a_step_without_sharding_on_auto_axes_keeps_parameters_and_momentum_in_place(
    machine, monkeypatch
):
    """The compiler moves matrices as it likes, and only a step as a whole has a place to keep."""
    MACHINES[machine](monkeypatch)
    sizes, names, a, b, types = MESHES["fsdp x tensor"]
    mesh, tx = make_mesh(sizes, names, types), chain()
    wanted = modules_of(shardings(mesh, a, b), SOME)
    grads = jax.device_put(modules_of(gradients(), SOME), wanted)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    with jax.set_mesh(mesh):
        params, state, _ = step(grads, tx.init(grads))
        params, state, updates = step(params, state)
    assert_equal(updates, "defaults", SOME)
    for tree in (params, find_momentum(state)[0]):
        for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "defaults"])
def test_options_on_a_mesh(options):
    """Most tell rows from columns, where workers have matrices that are stored in either way."""
    check(options, "fsdp x tensor", SOME)


@pytest.mark.parametrize("machine", ["gpu", "tpu"])
@pytest.mark.parametrize("mesh", ["fsdp x tensor", "with replicas, explicit"])
def test_other_machines_on_a_mesh(mesh, machine, monkeypatch):
    """Matrices are stacked there, and a TPU joins shards in a way of its own."""
    play(monkeypatch, machine)
    check("defaults", mesh, (*SOME, "up2", "k", "narrow"))


def test_several_buckets(monkeypatch):
    monkeypatch.setattr(planning, "BUCKET_BYTES", 4 * D * D)
    check("defaults", "fsdp x tensor", (*SOME, "k", "up2", "down2"))
