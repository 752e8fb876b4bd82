"""Inside ``jax.shard_map`` matrices are whole, or refused where their types say that they vary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from tests.support.mesh import AUTO, EXPLICIT, P, assert_same, make_mesh
from tests.support.trees import random_tree

KINDS = pytest.mark.parametrize("types", [AUTO, EXPLICIT])
LAYERS = omp.MuonDimensionNumbers(1, 2)


def mapped(tx, mesh, spec, x, check_vma=True, names=None, before=lambda x: x, place=None):
    """The first update of ``x``, which lies as ``spec`` says, computed inside of a shard_map."""
    step = jax.shard_map(
        lambda g: tx.update(before(g), tx.init(g), g)[0],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=names or set(mesh.axis_names),
        check_vma=check_vma,
    )
    with jax.set_mesh(mesh):
        return jax.jit(step)(jax.device_put(x, NamedSharding(mesh, place or spec)))


def update(tx, x):
    return tx.update(x, tx.init(x), x)[0]


of_mano = functools.partial(omp.matrix_chain, omp.contrib.Mano())


@KINDS
@pytest.mark.parametrize(
    "spec, names, link",
    [
        (P("a", "b"), None, omp.scale_by_muonplus),
        (P(None, "a"), {"a"}, omp.scale_by_muonplus),
        (P("b"), None, omp.normalize),
        (P("b"), None, of_mano),
    ],
)
def test_a_cut_matrix_is_refused(types, spec, names, link):
    (x,) = random_tree([(16, 24)])
    with pytest.raises(ValueError, match=r"varies over .*shard of a matrix.*sharding="):
        mapped(link(), make_mesh((4, 2), "ab", types), spec, x, names=names)


@KINDS
def test_the_leaf_is_named_and_what_is_no_matrix_is_free(types):
    params = {"up": {"kernel": jnp.ones((16, 24)), "bias": jnp.ones(24)}}
    mesh = make_mesh((4, 2), "ab", types)
    tx = omp.muonplus(0.1)
    specs = {"up": {"kernel": P(), "bias": P("a")}}
    step = jax.shard_map(
        lambda g: tx.update(g, tx.init(g), g)[0], mesh=mesh, in_specs=(specs,), out_specs=specs
    )
    with jax.set_mesh(mesh):
        updates = jax.jit(step)(
            jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
        )
    assert_same(jax.device_get(updates), update(tx, params))
    cut = jax.shard_map(lambda g: tx.init(g) and g, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    with pytest.raises(ValueError, match="up/kernel: it varies over a,") as caught:
        jax.eval_shape(
            cut, params if types == AUTO else jax.device_put(params, NamedSharding(mesh, P("a")))
        )
    assert "up/bias" not in str(caught.value)


@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_layers_shared_out_are_whole_matrices_where_the_argument_says_so(types, check_vma):
    """One axis over the layers by hand, another over the matrices left to the library."""
    (x,) = random_tree([(8, 16, 24)])
    mesh = make_mesh((4, 2), "ab", types)

    def link(**where):
        return omp.scale_by_muonplus(where=omp.Matrices(weight_dimension_numbers=LAYERS, **where))

    expected = update(link(), x)
    alone = link(sharding=NamedSharding(mesh, P("a")))
    assert_same(jax.device_get(mapped(alone, mesh, P("a"), x, check_vma)), expected)
    both = link(sharding=NamedSharding(mesh, P("a", None, "b")))
    found = mapped(both, mesh, P("a"), x, check_vma, names={"a"}, place=P("a", None, "b"))
    assert_same(jax.device_get(found), expected)
    if check_vma:
        with pytest.raises(ValueError, match="it varies over a"):
            mapped(link(), mesh, P("a"), x)
    wrong = link(sharding=NamedSharding(mesh, P(None, "a")))
    with pytest.raises(ValueError, match=r"names a, .* a shard of a matrix has no polar factor"):
        mapped(wrong, mesh, P(None, "a"), x, check_vma)


@KINDS
def test_replicas_that_differ_are_whole_matrices_where_the_argument_says_so(types):
    """Each device trains a model of its own: local steps between averages."""
    (x,) = random_tree([(4, 16, 24)])
    mesh = make_mesh((4,), "a", types)
    tx = omp.scale_by_muonplus(where=omp.Matrices(sharding=NamedSharding(mesh, P())))
    step = jax.shard_map(
        lambda g: tx.update(g[0], tx.init(g[0]), g[0])[0][None],
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P("a"),
    )
    with jax.set_mesh(mesh):
        found = jax.jit(step)(jax.device_put(x, NamedSharding(mesh, P("a"))))
    for each, one in zip(jax.device_get(found), x, strict=True):
        np.testing.assert_allclose(each, update(omp.scale_by_muonplus(), one), atol=1e-6)


@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_averaged_gradients_need_no_argument(types, check_vma):
    (x,) = random_tree([(16, 24)])
    mesh = make_mesh((4, 2), "ab", types)
    found = mapped(
        omp.scale_by_muonplus(), mesh, P(), x, check_vma, before=lambda g: jax.lax.pmean(g, "a")
    )
    assert_same(jax.device_get(found), update(omp.scale_by_muonplus(), x))


def test_axes_of_size_one_cut_nothing():
    (x,) = random_tree([(16, 24)])
    mesh = make_mesh((1, 8), "ab")
    found = mapped(omp.scale_by_muonplus(), mesh, P("a"), x, names={"a"})
    assert_same(jax.device_get(found), update(omp.scale_by_muonplus(), x))
