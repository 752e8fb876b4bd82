"""The optimizer's state: its size, structure, dtypes, and life in jit, scan and checkpoints."""

import functools

import flax.serialization
import jax
import numpy as np
import optax
import orbax.checkpoint
import pytest

import optax_muonplus as omp
from tests.support.trees import SHAPES, assert_trees_close, random_tree

KINDS = {
    "muonplus": omp.muonplus,
    "corrected": functools.partial(omp.muonplus, bias_correction=True),
    "int8": functools.partial(omp.muonplus, mu_dtype="int8"),
    "recorded": lambda *rate, **given: omp.contrib.recorded(omp.muonplus(*rate, **given), every=2),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@every_kind
def test_state_keeps_structure_shapes_and_dtypes(make):
    """So that it can be carried through lax.scan, and made by eval_shape."""
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    tx = make(optax.linear_schedule(0.1, 0.0, 5), weight_decay=0.1)
    state = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
    _, new = jax.jit(tx.update)(grads, state, params)

    def description(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    assert description(abstract) == description(state) == description(new)
    _, stacked = jax.lax.scan(lambda s, _: tx.update(grads, s, params)[::-1], state, length=3)
    assert jax.tree.structure(stacked) == jax.tree.structure(params)


@every_kind
def test_buffers_can_be_donated(make):
    """Every buffer of parameters and state is reused; JAX warns, hence fails, if one is not."""
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    tx = make(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    jax.block_until_ready(step(params, state, grads))
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


@every_kind
def test_state_survives_serialization(tmp_path, make):
    """Flax's bytes and an Orbax checkpoint; training goes on as if nothing had happened."""
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    tx = make(0.1)
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(params), params)
    expected = update(grads, state, params)

    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(tx.init(params), data)
    assert_trees_close(update(grads, restored, params), expected, rtol=0, atol=0)

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(tx.init, params)
        restored = checkpointer.restore(tmp_path / "state", target)
    assert_trees_close(update(grads, restored, params), expected, rtol=0, atol=0)


def put(state, kind):
    """Arrays with axes in that memory; counts stay where they are."""
    where = jax.tree.map(
        lambda x: x.sharding.with_memory_kind(kind) if x.ndim else x.sharding, state
    )
    return jax.device_put(state, where)


@pytest.mark.parametrize("mu_dtype", [None, "int8"])
def test_a_state_in_the_memory_of_the_host_gives_the_same_bits(mu_dtype):
    """It goes there between updates, by shardings alone."""
    params = random_tree(SHAPES)
    tx = omp.muonplus(0.1, mu_dtype=mu_dtype)
    update = jax.jit(tx.update, donate_argnums=1)
    kept, away = tx.init(params), put(tx.init(params), "pinned_host")
    for seed in range(1, 4):
        grads = random_tree(SHAPES, seed)
        expected, kept = update(grads, kept, params)
        updates, state = update(grads, put(away, "device"), params)
        away = put(state, "pinned_host")
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(away) if x.ndim}
        assert kinds == {"pinned_host"}
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
    jax.tree.map(np.testing.assert_array_equal, put(away, "device"), kept)
