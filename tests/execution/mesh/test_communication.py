"""What devices send and work on: whole matrices once, in the dtype of products, in two moves."""

import re

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from optax_muonplus import polar
from tests.support.compilation import collectives
from tests.support.mesh import (
    D,
    P,
    assert_same,
    lowered_update,
    make_mesh,
    shape,
    small,
)
from tests.support.trees import random_like


def test_only_whole_matrices_are_orthogonalized():
    """Once each: no shard, no copy, no padding."""
    seen = []

    def spy(x):
        seen.append(x.shape)
        return polar.polar_factor(x)

    shapes = {"q/kernel": (8, D, D), "up/kernel": (8, D, 4 * D), "down/kernel": (8, 4 * D, D)}
    dims = omp.MuonDimensionNumbers(-2, -1)
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()})
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P(None, "a", "b")), grads)
    tx = omp.scale_by_muonplus(
        polar=spy,
        norm="col_row",
        match_frobenius=False,
        where=omp.Matrices(weight_dimension_numbers=dims, sharding=wanted),
    )
    sharded = jax.device_put(grads, wanted)
    state = tx.init(sharded)
    seen.clear()  # init looked at the shapes
    updates, _ = jax.jit(tx.update)(sharded, state)
    # 8 matrices on 8 devices, traced for the platform of these devices alone.
    assert sorted(seen) == [(D, D), (D, 4 * D), (4 * D, D)]
    for update in jax.tree.leaves(updates):  # and it did run: unit norms need the whole row
        norms = jnp.linalg.norm(jax.device_get(update), axis=-2)
        np.testing.assert_allclose(norms / norms.max(), 1, atol=1e-5)


def test_matrices_are_sent_in_the_dtype_of_products():
    mesh = make_mesh((4, 2), "ab")
    tree = {f"q{i}": {"kernel": shape(D, D)} for i in range(8)}
    tree |= {f"k{i}": {"kernel": shape(D, D, dtype=jnp.bfloat16)} for i in range(8)}
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P("a", "b")), tree)

    def moved(**options):
        tx = omp.muonplus(0.1, sharding=wanted, **options)
        # As traced: the CPU backend, which has no bfloat16 of its own, moves float32.
        text = lowered_update(tx, tree, wanted).as_text()
        return sorted(re.findall(r"all_to_all.*-> tensor<.*x(bf16|f32)>", text))

    # Momentum is float32 also for a bfloat16 gradient, whose update goes home as bfloat16.
    assert moved() == ["bf16", "f32", "f32", "f32"]
    assert moved(compute_dtype="bfloat16") == ["bf16", "bf16", "bf16", "f32"]


def test_an_update_is_two_all_to_alls():
    """Of what the update makes, nothing has the size of a whole matrix but what is worked on."""
    mesh = make_mesh((4, 2), "ab")
    tree = {f"{i}": {"kernel": shape(64, 64)} for i in range(32)}
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P("a", "b")), tree)
    lowered = lowered_update(omp.muonplus(0.1, sharding=wanted), tree, wanted)
    assert collectives(lowered.compile()) == ["all-to-all"] * 2
    # From 8 senders 4 shards of 8 x 64, in lines of 128 that a TPU does not have to store anew.
    assert re.findall(r"all_to_all.*-> tensor<(.*)xf32>", lowered.as_text()) == ["8x16x128"] * 2


def test_branches_return_bfloat16():
    """A device has a wide matrix or a tall one, and what is as large as that is bfloat16."""
    mesh = make_mesh((4, 2), "ab")
    shapes = {"up": (D, 4 * D), "down": (4 * D, D)}
    tree = {name: {"kernel": shape(*s, dtype=jnp.bfloat16)} for name, s in shapes.items()}
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P("a", "b")), tree)
    tx = omp.muonplus(0.1, sharding=wanted, compute_dtype="bfloat16")
    text = lowered_update(tx, tree, wanted).as_text()
    assert set(re.findall(r"\(tensor<i32>\) -> tensor<\d+x\d+x128x(\w+)>", text)) == {"bf16"}
    # So are polar factors, which norms read several times.
    for n, m in shapes.values():
        assert re.findall(rf"optimization_barrier.*<(?:1x)?{n}x{m}x(\w+)>", text) == ["bf16"]


@pytest.mark.parametrize(
    "known, sent",
    [
        (lambda s: s, ["all_to_all"] * 2),
        (lambda s: {"q": s, "k": None}, ["all_to_all"] * 2),
        (lambda s: None, []),
    ],
    ids=["both", "one", "none"],
)
def test_unknown_shardings_are_left_to_the_compiler(known, sent):
    """The traced program moves only matrices of known sharding; the compiler moves the others."""
    grads, sharding = small()
    where = omp.Matrices(sharding=known(sharding))
    tx, plain = omp.scale_by_muonplus(where=where), omp.scale_by_muonplus()
    lowered = jax.jit(tx.update).lower(grads, tx.init(grads))
    assert re.findall(r"stablehlo\.(all_\w+|collective_\w+)", lowered.as_text()) == sent
    compiled = lowered.compile()
    added = len(collectives(compiled)) - len(sent)
    assert added == 0 if known(sharding) is sharding else added > 0
    updates, _ = compiled(grads, tx.init(grads))
    whole = jax.device_get(grads)
    assert_same(updates, plain.update(whole, plain.init(whole))[0])
