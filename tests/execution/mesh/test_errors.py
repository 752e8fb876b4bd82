"""Shardings that cannot be right are refused, and the leaf is named."""

import jax
import jax.monitoring
import numpy as np
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from tests.support.mesh import AUTO, EXPLICIT, D, P, assert_same, make_mesh, small


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
    assert "shardings do not match the parameters: k/kernel has nothing" in message({"q": sharding})
    assert "NamedSharding" in message(P("a", "b"))  # the mesh is missing
    assert "k/kernel has Mesh('a': 4, 'b': 2" in message(mesh)  # the specs are missing
    single = jax.tree.map(np.asarray, grads)
    too_long = {"q": NamedSharding(mesh, P("a", None, "b")), "k": None}
    assert "q/kernel" in message(too_long, single)
    odd = {"q": {"kernel": np.ones((D, 6))}, "k": {"kernel": np.ones((D, D))}}
    shown = message(NamedSharding(mesh, P(None, "a")), odd)
    assert "q/kernel" in shown and "(16, 6) into [1, 4]" in shown and "k/kernel" not in shown
    elsewhere = NamedSharding(make_mesh((8,), "c"), P("c"))
    assert "on one mesh" in message({"q": sharding, "k": elsewhere}, single)
    shown = message(elsewhere)  # of arrays that lie on a mesh
    assert "q/kernel: " in shown and "names c, which the mesh of the parameters lacks" in shown


@pytest.mark.parametrize(
    "link", [omp.orthogonalize, omp.normalize, omp.scale_by_shape, omp.scale_by_muonplus]
)
def test_links_look_at_the_argument(link):
    sharding = NamedSharding(make_mesh((4, 2), "ab"), P(None, "a"))
    with pytest.raises(ValueError, match=r"up/kernel: .*, 6\) into \[1, 4\]"):
        link(where=omp.Matrices(sharding=sharding)).init(
            {"up": {"kernel": np.ones((D, 6), np.float32)}}
        )


def test_shardings_of_what_adamw_gets_are_checked_too():
    given = NamedSharding(make_mesh((4, 2), "ab"), P("a"))
    params = {"up": {"kernel": np.ones((D, D)), "bias": np.ones(6)}}
    with pytest.raises(ValueError, match=r"Shardings do not fit\. up/bias: .*\(6,\) into \[4\]"):
        omp.muonplus(0.1, sharding=given).init(params)


@pytest.mark.parametrize("given", [None, P("a", "b"), P(("a", "b"))])
def test_the_numbers_on_a_mesh_of_mixed_axis_types_are_those_of_one_device(given):
    mesh = make_mesh((4, 2), "ab", (AUTO, EXPLICIT))
    whole = jax.device_get(small()[0])
    grads = jax.device_put(whole, NamedSharding(mesh, given or P("a", "b")))
    tx = omp.muonplus(0.1, sharding=given and NamedSharding(mesh, given))
    with jax.set_mesh(mesh):
        updates = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])(grads)
    tx = omp.muonplus(0.1)
    assert_same(updates, tx.update(whole, tx.init(whole), whole)[0])


def test_shards_inside_a_shard_map_are_refused():
    grads, sharding = small()
    tx = omp.scale_by_muonplus(where=omp.Matrices(sharding=sharding))
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=sharding.mesh,
        in_specs=P("a", "b"),
        out_specs=P("a", "b"),
    )
    with pytest.raises(ValueError, match="a shard of a matrix has no polar factor"):
        jax.jit(mapped)(grads)
