"""Matrices that lie in shards: the numbers of one device, two moves, nothing else on the way."""

import contextlib
import functools
import math
import re

import flax.core
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_muonplus as omp
from benchmarks.trees import random_like
from optax_muonplus import polar
from optax_muonplus._mesh import routes
from optax_muonplus.matrices import _batching as grouping

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
    "narrow/kernel": (shape(D, D, dtype=jnp.bfloat16), lambda a, b: P(a, b)),
    "embed/embedding": (shape(4 * D, D), lambda a, b: P(a, b)),
    "norm/scale": (shape(D), lambda a, b: P(a)),
}
RULES = [
    ("scanned|stacked", omp.MuonDimensionNumbers(-2, -1)),
    ("experts", omp.MuonDimensionNumbers(-1, -2)),
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


def make_mesh(sizes, names, types=AUTO):
    names = tuple(names)
    types = (types,) * len(names) if isinstance(types, AxisType) else types
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def shardings(mesh, a, b):
    """Of all leaves; an axis that is None is one that the mesh does not have."""
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
        # As a program: the state lies where that of an update does, one compilation for both.
        state = jax.jit(tx.init)(grads)
    _, state = update(grads, state, grads)
    return update(jax.tree.map(lambda g: g + g * g, grads), state, grads)


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


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_update_of_one_device(name):
    sizes, names, a, b, types = MESHES[name]
    mesh = make_mesh(sizes, names, types)
    wanted = shardings(mesh, a, b)
    given = None if types == EXPLICIT else wanted
    tx = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, sharding=given)
    updates, state = two_steps(tx, jax.device_put(gradients(), wanted))
    assert_same(updates, alone()[0], wanted)
    mu = state.inner_states["muon"].inner_state[0][0].mu
    assert_same(mu, alone()[1].inner_states["muon"].inner_state[0][0].mu)
    for module, leaf in wanted.items():
        for part, sharding in leaf.items():
            momentum = mu[module][part]
            if isinstance(momentum, jax.Array):
                assert momentum.sharding.is_equivalent_to(sharding, momentum.ndim)


@pytest.mark.parametrize("name", ["fsdp x tensor", "with replicas, explicit"])
def test_stacks_as_on_accelerators(name, monkeypatch):
    sizes, names, a, b, types = MESHES[name]
    wanted = shardings(make_mesh(sizes, names, types), a, b)
    tx = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, sharding=wanted)
    monkeypatch.setattr(grouping, "_looped", grouping._stacked)
    updates, _ = two_steps(tx, jax.device_put(gradients(), wanted))
    assert_same(updates, alone()[0], wanted)


OPTIONS = {
    "row, nesterov": {"norm": "row", "nesterov": True, "bias_correction": True},
    "matched": {"norm": "row_col", "match_frobenius": True, "shape_scale": "max"},
    "adaptive": {"norm": "col", "adaptive": True, "consistent_rms": 0.2},
    "aol": {"norm": "none", "preconditioning": "aol", "polar": "newton_schulz"},
    "own": {"polar": lambda x: x / (1 + jnp.sum(x * x, axis=-1, keepdims=True))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_rule_sees_rows_and_columns(name):
    """Not the same on transposed matrices, where each worker has one stored in its own way."""
    leaves = ("up", "down", "wide", "q", "wo", "fused")
    grads = {module: gradients()[module] for module in leaves}
    wanted = {module: shardings(make_mesh((4, 2), "ab"), "a", "b")[module] for module in leaves}
    build = functools.partial(
        omp.muonplus,
        0.1,
        muon_weight_dimension_numbers=functools.partial(
            omp.muon_dimension_numbers, rules=RULES[-1:]
        ),
        **OPTIONS[name],
    )
    expected, _ = two_steps(build(), grads)
    updates, _ = two_steps(build(sharding=wanted), jax.device_put(grads, wanted))
    assert_same(updates, expected, wanted)


# --- what is worked on, and where -----------------------------------------------------------------


def test_only_whole_matrices_are_orthogonalized():
    """Once each: no shard, no copy, no padding."""
    seen = []

    def spy(x):
        seen.append(x.shape)
        return polar.newton_schulz(x)

    shapes = {"q/kernel": (8, D, D), "up/kernel": (8, D, 4 * D), "down/kernel": (8, 4 * D, D)}
    dims = omp.MuonDimensionNumbers(-2, -1)
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()})
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P(None, "a", "b")), grads)
    tx = omp.scale_by_muonplus(polar=spy, weight_dimension_numbers=dims, sharding=wanted)
    sharded = jax.device_put(grads, wanted)
    state = tx.init(sharded)
    seen.clear()  # init looked at the shapes
    updates, _ = jax.jit(tx.update)(sharded, state)
    assert {s[-2:] for s in seen} == {(D, D), (4 * D, D), (D, 4 * D)}
    assert all(s[0] == 1 for s in seen)  # 8 matrices on 8 devices
    for update in jax.tree.leaves(updates):  # and it did run: unit norms need the whole row
        norms = jnp.linalg.norm(jax.device_get(update), axis=-2)
        np.testing.assert_allclose(norms / norms.max(), 1, atol=1e-5)


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


COLLECTIVE = (
    r" = (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)


def collectives(compiled):
    """(kind, what it moves) of each in the program."""
    return [(kind, what) for what, kind in re.findall(COLLECTIVE, compiled.as_text())]


def test_matrices_travel_in_the_dtype_of_products():
    mesh = make_mesh((4, 2), "ab")
    tree = {f"q{i}": {"kernel": shape(D, D)} for i in range(8)}
    tree |= {f"k{i}": {"kernel": shape(D, D, dtype=jnp.bfloat16)} for i in range(8)}
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P("a", "b")), tree)

    def moved(**options):
        tx = omp.muonplus(0.1, sharding=wanted, **options)
        # As traced: the CPU backend, which has no bfloat16 of its own, moves float32.
        text = lowered_update(tx, tree, wanted).as_text()
        return sorted(re.findall(r"all_to_all.*-> tensor<.*x(bf16|f16|f32)>", text))

    # Momentum is float32 also for a bfloat16 gradient, whose update goes home as bfloat16.
    assert moved() == ["bf16", "f32", "f32", "f32"]
    assert moved(compute_dtype="bfloat16") == ["bf16", "bf16", "bf16", "f32"]
    # float16 has no exponents for small gradients.
    assert moved(compute_dtype="float16") == ["bf16", "f32", "f32", "f32"]


def test_bfloat16_on_the_way_keeps_unit_rows():
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({f"{i}": {"kernel": shape(64, 128)} for i in range(3)})
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P("a", "b")), grads)
    build = functools.partial(
        omp.scale_by_muonplus, norm="row", shape_scale="none", compute_dtype="bfloat16"
    )
    tx = build(sharding=wanted)
    sharded = jax.device_put(grads, wanted)
    updates, _ = jax.jit(tx.update)(sharded, tx.init(sharded))
    expected, _ = jax.jit(build().update)(grads, build().init(grads))
    for found, update in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.linalg.norm(found, axis=0), 1, atol=1e-6)
        # Rounded on the way or on arrival: the same numbers.
        np.testing.assert_allclose(found, update, atol=1e-6)


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_state_is_sharded_from_init_on(types):
    mesh = make_mesh((4, 2), "ab", types)
    wanted = shardings(mesh, "a", "b")
    params = jax.device_put(gradients(), wanted)
    tx = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, sharding=wanted)
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(tx.init, params)
        states = [tx.init(params), jax.jit(tx.init)(params)]
    for state in states:
        assert jax.tree.structure(state) == jax.tree.structure(abstract)
        found = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            if len(keys) == 3:  # group, module, leaf
                sharding = wanted[keys[1]][keys[2]]
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path
                found += 1
        assert found == len(LEAVES) + 2  # AdamW has two for each
    if types == EXPLICIT:
        momentum = abstract.inner_states["muon"].inner_state[0][0].mu["up"]["kernel"]
        assert momentum.sharding.spec == P("a", "b")


def test_no_momentum_is_gathered():
    """Of what the update makes, nothing has the size of a whole matrix but what is worked on."""
    mesh = make_mesh((4, 2), "ab")
    tree = {f"{i}": {"kernel": shape(64, 64)} for i in range(32)}
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P("a", "b")), tree)
    found = collectives(lowered_update(omp.muonplus(0.1, sharding=wanted), tree, wanted).compile())
    assert [kind for kind, _ in found] == ["all-to-all"] * 2


# --- the argument -----------------------------------------------------------------------------


def small():
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({"q": {"kernel": shape(D, D)}, "k": {"kernel": shape(D, D)}})
    sharding = NamedSharding(mesh, P("a", "b"))
    return jax.device_put(grads, sharding), sharding


@pytest.mark.parametrize(
    "form",
    [
        lambda s: {"q": {"kernel": s}, "k": {"kernel": s}},
        lambda s: {"q": s, "k": s},
        lambda s: s,
        lambda s: lambda params: jax.tree.map(lambda _: s, params),
        lambda s: flax.core.freeze({"q": {"kernel": s}, "k": {"kernel": s}}),
    ],
    ids=["tree", "prefix", "root", "function", "another container"],
)
def test_forms_of_the_argument(form):
    grads, sharding = small()
    tx = omp.scale_by_muonplus(sharding=form(sharding))
    compiled = jax.jit(tx.update).lower(grads, tx.init(grads)).compile()
    kinds = [kind for kind, _ in collectives(compiled)]
    # Two matrices for eight devices: two groups of four gather one each, and repeat the work.
    assert kinds == ["all-to-all", "all-gather", "all-to-all"]


def test_what_is_not_known_is_left_to_the_compiler():
    grads, sharding = small()
    expected, _ = omp.scale_by_muonplus().update(grads, omp.scale_by_muonplus().init(grads))
    for given in (None, {"q": sharding, "k": None}):
        tx = omp.scale_by_muonplus(sharding=given)
        updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
        assert_same(updates, expected)


def test_the_same_line_on_one_device():
    grads = random_like({"q": {"kernel": shape(D, D)}})
    tx = omp.muonplus(0.1, sharding=jax.tree.map(lambda x: x.sharding, grads))
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    expected, _ = jax.jit(omp.muonplus(0.1).update)(grads, omp.muonplus(0.1).init(grads), grads)
    assert_same(updates, expected)


def test_links_one_by_one():
    grads, sharding = small()
    tx = optax.chain(
        omp.momentum(),
        omp.orthogonalize(sharding=sharding),
        omp.normalize(sharding=sharding),
        omp.scale_by_shape(sharding=sharding),
    )
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    whole = omp.scale_by_muonplus(sharding=sharding)
    assert_same(updates, jax.jit(whole.update)(grads, whole.init(grads))[0], grads_like(sharding))


def grads_like(sharding):
    return {"q": {"kernel": sharding}, "k": {"kernel": sharding}}


def test_outside_of_jit_a_second_update_compiles_nothing():
    grads, sharding = small()
    tx = omp.muonplus(0.1, sharding=sharding)
    state = tx.init(grads)
    updates, state = tx.update(grads, state, grads)
    assert_same(updates, jax.jit(tx.update)(grads, tx.init(grads), grads)[0], grads_like(sharding))
    with jax.log_compiles(), assert_compiles_nothing():
        tx.update(grads, state, grads)


@contextlib.contextmanager
def assert_compiles_nothing():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        yield
        assert not compiled
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("types", [AUTO, EXPLICIT, (AUTO, EXPLICIT)])
def test_with_a_mesh_that_is_set(types):
    mesh = make_mesh((4, 2), "ab", types)
    sharding = NamedSharding(mesh, P("a", "b"))
    grads = jax.device_put(small()[0], sharding)
    whole = jax.device_get(small()[0])
    expected, _ = omp.scale_by_muonplus().update(whole, omp.scale_by_muonplus().init(whole))
    given = None if types == EXPLICIT else sharding
    tx = omp.scale_by_muonplus(sharding=given)
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    assert_same(updates, expected, grads_like(sharding))


@pytest.mark.parametrize("types", [AUTO, EXPLICIT, (AUTO, EXPLICIT), (EXPLICIT, AUTO)])
def test_inside_a_shard_map_over_other_axes(types):
    """Gradients averaged by hand over one axis, matrices sharded over the other."""
    mesh = make_mesh((4, 2), "ab", types)
    sharding = NamedSharding(mesh, P(None, "b"))
    grads = jax.device_put(small()[0], sharding)
    tx = omp.scale_by_muonplus(sharding=sharding)

    def step(grads):
        return tx.update(jax.lax.pmean(grads, "a"), tx.init(grads))[0]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"a"}, check_vma=False
    )
    expected, _ = jax.jit(tx.update)(grads, tx.init(grads))
    assert_same(jax.jit(mapped)(grads), expected)


def test_nnx_optimizer_on_a_mesh():
    mesh = make_mesh((4, 2), "ab")
    model = nnx.Linear(D, 4 * D, rngs=nnx.Rngs(0))
    wanted = {"kernel": NamedSharding(mesh, P("a", "b")), "bias": NamedSharding(mesh, P("b"))}
    nnx.update(model, jax.device_put(nnx.to_pure_dict(nnx.state(model)), wanted))
    optimizer = nnx.Optimizer(model, omp.muonplus(0.1, sharding=wanted), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(model, optimizer, grads)
    assert model.kernel[...].sharding.is_equivalent_to(wanted["kernel"], 2)
    assert np.isfinite(model.kernel[...]).all()


# --- bad input ------------------------------------------------------------------------------------


def test_errors_name_the_leaf():
    grads, sharding = small()
    mesh = sharding.mesh

    def message(given, params=grads):
        with pytest.raises(ValueError) as caught:
            omp.muonplus(0.1, sharding=given).init(params)
        return str(caught.value)

    other = NamedSharding(mesh, P("b", "a"))
    shown = message({"q": sharding, "k": other})
    assert "k/kernel is" in shown and "q/kernel" not in shown and "device_put" in shown
    assert "Parameters without an entry: k/kernel" in message({"q": sharding})
    assert "Entries without a parameter: z" in message({"q": sharding, "k": None, "z": sharding})
    assert "NamedSharding" in message(P("a", "b"))  # the mesh is missing
    single = jax.tree.map(np.asarray, grads)
    too_long = {"q": NamedSharding(mesh, P("a", None, "b")), "k": None}
    assert "q/kernel" in message(too_long, single)
    unknown = {"q": NamedSharding(mesh, P(P.UNCONSTRAINED, "b")), "k": None}
    assert "q/kernel" in message(unknown, single) and "unconstrained" in message(unknown, single)
    odd = {"q": {"kernel": np.ones((D, 6))}, "k": {"kernel": np.ones((D, D))}}
    shown = message(NamedSharding(mesh, P(None, "a")), odd)
    assert "q/kernel" in shown and "size 6, into 4" in shown and "k/kernel" not in shown
    elsewhere = NamedSharding(make_mesh((8,), "c"), P("c"))
    assert "on one mesh" in message({"q": sharding, "k": elsewhere}, single)


def test_types_that_say_otherwise():
    mesh = make_mesh((4, 2), "ab", EXPLICIT)
    grads = jax.device_put(small()[0], NamedSharding(mesh, P("a", "b")))
    tx = omp.muonplus(0.1, sharding=NamedSharding(mesh, P("b", "a")))
    with pytest.raises(ValueError, match=r"q/kernel: sharding= says .*, the array's type"):
        jax.eval_shape(tx.init, grads)
    with pytest.raises(ValueError, match="q/kernel: sharding= is on"):
        given = NamedSharding(make_mesh((8,), "a"), P("a"))
        jax.eval_shape(omp.muonplus(0.1, sharding=given).init, grads)


def test_axes_of_two_types_need_the_argument():
    mesh = make_mesh((4, 2), "ab", (AUTO, EXPLICIT))
    grads = jax.device_put(small()[0], NamedSharding(mesh, P("a", "b")))
    tx = omp.muonplus(0.1)
    with pytest.raises(ValueError, match=r"q/kernel: its type says .* nothing about a.*sharding="):
        jax.jit(tx.update)(grads, tx.init(grads), grads)
    grads = jax.device_put(small()[0], NamedSharding(mesh, P(("b", "a"))))
    inner = omp.muonplus(0.1, sharding=NamedSharding(mesh, P(("a", "b"))))
    with pytest.raises(ValueError, match="name the Explicit one first"):
        jax.eval_shape(inner.init, grads)


def test_shards_inside_a_shard_map_are_refused():
    grads, sharding = small()
    tx = omp.scale_by_muonplus(sharding=sharding)
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=sharding.mesh,
        in_specs=P("a", "b"),
        out_specs=P("a", "b"),
    )
    with pytest.raises(ValueError, match="a shard of a matrix has no polar factor"):
        jax.jit(mapped)(grads)


# --- and beyond -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "b"), P()])
def test_derivatives_go_through_the_moves(spec, monkeypatch):
    monkeypatch.setattr(routes, "OPERATIONS_PER_BYTE", 0)  # also small replicas are shared out
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({f"{i}": {"kernel": shape(D, 2 * D)} for i in range(3)})
    weights = random_like(grads, seed=1)
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, spec), grads)

    def of_update(tx, weights):
        def inner(grads):
            updates, _ = tx.update(grads, tx.init(grads))
            return optax.tree.vdot(updates, weights)

        return jax.jit(jax.grad(inner))

    expected = of_update(omp.scale_by_muonplus(ns_steps=2), weights)(grads)
    sharded = of_update(
        omp.scale_by_muonplus(ns_steps=2, sharding=wanted), jax.device_put(weights, wanted)
    )
    assert_same(sharded(jax.device_put(grads, wanted)), expected)


def test_shipments_one_after_the_other(monkeypatch):
    monkeypatch.setattr(routes, "SHIPMENT_BYTES", 4 * D * D)
    mesh = make_mesh((4, 2), "ab")
    wanted = shardings(mesh, "a", "b")
    tx = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, sharding=wanted)
    updates, _ = two_steps(tx, jax.device_put(gradients(), wanted))
    assert_same(updates, alone()[0], wanted)


def test_table_says_where_and_who():
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


@pytest.mark.parametrize("types", [AUTO, EXPLICIT, (AUTO, EXPLICIT)])
@pytest.mark.parametrize("options", [{}, {"adaptive": True, "consistent_rms": 0.2}])
def test_injected_hyperparameters_that_lie_on_the_mesh(types, options):
    """As those do that a step before gave back."""
    mesh = make_mesh((4, 2), "ab", types)
    sharding = NamedSharding(mesh, P("a", "b"))
    whole = jax.device_get(small()[0])
    grads = jax.device_put(whole, sharding)
    build = optax.inject_hyperparams(omp.muonplus)
    tx = build(0.1, sharding=sharding, **options)
    update, state = jax.jit(tx.update), tx.init(grads)
    alone = build(0.1, **options)
    _, alone_state = alone.update(whole, alone.init(whole), whole)
    _, state = update(grads, state, grads)
    state.hyperparams["norm_eps"] = state.hyperparams["norm_eps"] * 10
    alone_state.hyperparams["norm_eps"] = alone_state.hyperparams["norm_eps"] * 10
    expected, _ = alone.update(whole, alone_state, whole)
    assert_same(update(grads, state, grads)[0], expected, grads_like(sharding))
    assert_same(tx.update(grads, state, grads)[0], expected, grads_like(sharding))
