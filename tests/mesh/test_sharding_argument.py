"""The argument `sharding`: its forms, and how it goes with types, meshes, jit and shard_map."""

import flax.core
import jax
import jax.monitoring
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import optax_muonplus as omp
from tests.support.compilation import collectives, compilations
from tests.support.mesh import (
    AUTO,
    DIMS,
    EXPLICIT,
    LEAVES,
    D,
    P,
    assert_same,
    gradients,
    grads_like,
    make_mesh,
    shape,
    shardings,
    small,
)
from tests.support.trees import random_like


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
    # Two matrices for eight devices: two groups of four gather one each, and repeat the work.
    assert collectives(compiled) == ["all-to-all", "all-gather", "all-to-all"]


def test_shardings_of_one_device_are_accepted():
    grads = random_like({"q": {"kernel": shape(D, D)}})
    tx = omp.muonplus(0.1, sharding=jax.tree.map(lambda x: x.sharding, grads))
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    expected, _ = jax.jit(omp.muonplus(0.1).update)(grads, omp.muonplus(0.1).init(grads), grads)
    assert_same(updates, expected)


def test_links_chained_by_hand_give_the_same_update():
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


def test_second_eager_update_compiles_nothing():
    grads, sharding = small()
    tx = omp.muonplus(0.1, sharding=sharding)
    state = tx.init(grads)
    updates, state = tx.update(grads, state, grads)
    assert_same(updates, jax.jit(tx.update)(grads, tx.init(grads), grads)[0], grads_like(sharding))
    with compilations() as compiled:
        tx.update(grads, state, grads)
    assert not compiled


@pytest.mark.parametrize("types", [AUTO, EXPLICIT, (AUTO, EXPLICIT), (EXPLICIT, AUTO)])
def test_inside_a_shard_map_over_other_axes(types):
    """Gradients averaged by hand over one axis, matrices sharded over the other."""
    mesh = make_mesh((4, 2), "ab", types)
    sharding = NamedSharding(mesh, P(None, "b"))
    grads = jax.device_put(small()[0], sharding)
    whole = jax.device_get(grads)
    expected, _ = omp.scale_by_muonplus().update(whole, omp.scale_by_muonplus().init(whole))
    tx = omp.scale_by_muonplus(sharding=sharding)

    def step(grads):
        return tx.update(jax.lax.pmean(grads, "a"), tx.init(grads))[0]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"a"}, check_vma=False
    )
    assert_same(jax.jit(mapped)(grads), expected)


def test_nnx_optimizer_on_a_mesh():
    mesh = make_mesh((4, 2), "ab")
    wanted = {"kernel": NamedSharding(mesh, P("a", "b")), "bias": NamedSharding(mesh, P("b"))}

    def after_one_step(sharding):
        model = nnx.Linear(D, 4 * D, rngs=nnx.Rngs(0))
        if sharding is not None:
            nnx.update(model, jax.device_put(nnx.to_pure_dict(nnx.state(model)), sharding))
        optimizer = nnx.Optimizer(model, omp.muonplus(0.1, sharding=sharding), wrt=nnx.Param)
        grads = jax.tree.map(lambda x: x + x * x, nnx.state(model, nnx.Param))
        nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(
            model, optimizer, grads
        )
        return nnx.to_pure_dict(nnx.state(model))

    assert_same(after_one_step(wanted), after_one_step(None), wanted)


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
        momentum = omp.transforms.find_momentum(abstract).mu["up"]["kernel"]
        assert momentum.sharding.spec == P("a", "b")
