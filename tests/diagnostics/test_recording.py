"""When and what is recorded; the update stays the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from optax_muonplus.diagnostics import read, recorded, watched
from tests.support.records import (
    DIMS,
    FEW,
    RULES,
    SHAPES,
    assert_records_close,
    run,
    tree,
)

OPTIONS = {
    "default": {},
    "nesterov": {"nesterov": True, "bias_correction": True, "weight_decay": 0.1},
    "svd": {"polar": "svd", "norm": "row_col", "match_frobenius": True},
    "own function": {"polar": lambda x: x - x.mean(axis=-1, keepdims=True), "adaptive": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_updates_and_inner_state_are_the_same_bit_for_bit(name):
    dtype = "bfloat16" if name == "nesterov" else "float32"
    parts = ("up", "down", "fused", "nothing")
    shapes = {part: SHAPES[part] for part in parts}
    dims = functools.partial(omp.muon_dimension_numbers, rules=RULES[1:2])
    options = {"learning_rate": 0.1, "muon_weight_dimension_numbers": dims, **OPTIONS[name]}
    plain, plain_state = run(omp.muonplus(**options), 3, dtype, shapes)
    made = recorded(omp.muonplus, every=2, measures=FEW)
    recording, state = run(made(**options), 3, dtype, shapes)
    assert read(state).step == 2
    for one, other in [(plain, recording), (plain_state, state.inner)]:
        assert jax.tree.structure(one) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_recording_never_is_the_program_without_recording():
    params = tree(shapes={"up": {"kernel": (6, 8), "bias": (8,)}})
    for off in (None, 0):
        for factory in (omp.muonplus, functools.partial(omp.muon, beta=0.9)):
            made, plain = recorded(factory, every=off)(0.1), factory(0.1)
            texts = [
                jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
                for tx in (made, plain)
            ]
            assert texts[0] == texts[1]
        link = omp.normalize()
        assert watched(link, every=off) is link


@pytest.mark.cpu_program
def test_updates_between_records_repeat_no_work():
    """Nothing is orthogonalized again, and no donated momentum buffer is copied."""
    calls = []

    def polar(x):
        jax.debug.callback(lambda: calls.append(1))
        return x / (1 + jnp.max(jnp.abs(x)))

    shapes = {f"layer_{i}": {"kernel": (12, 12)} for i in range(3)}
    params = tree(shapes=shapes)
    made = {"plain": omp.muonplus(0.1, polar=polar)}
    made["recorded"] = recorded(omp.muonplus, every=2, measures=FEW)(0.1, polar=polar)
    copies, counts = {}, {}
    for name, tx in made.items():
        state = jax.tree.map(jnp.copy, tx.init(params))
        step = jax.jit(tx.update, donate_argnums=1).lower(params, state, params).compile()
        every_time = step.as_text().partition("ENTRY")[2]  # without branches and loops
        copies[name] = every_time.count("f32[12,12]{1,0} copy(")
        counts[name] = []
        for _ in range(3):
            calls.clear()
            _, state = jax.block_until_ready(step(params, state, params))
            jax.effects_barrier()
            counts[name].append(len(calls))
    assert counts == {"plain": [3, 3, 3], "recorded": [3, 6, 3]}
    assert copies["recorded"] == copies["plain"]


def test_records_are_made_at_chosen_updates():
    shapes = {"dense": {"kernel": (6, 8)}}
    chosen = {"every": (3, [-1, -1, 3, 3, 3, 6]), "first": (lambda t: t < 3, [1, 2, 2, 2, 2, 2])}
    for every, steps in chosen.values():
        tx = recorded(omp.muonplus, every=every, measures=FEW)(0.1)
        grads = tree(shapes=shapes)
        state, update, seen, found = tx.init(grads), jax.jit(tx.update), [], []
        for step in range(6):
            _, state = update(tree(step, shapes=shapes), state, grads)
            seen.append(read(state).step)
            found.append(read(state).values["dense/kernel"]["momentum/rms"])
        assert seen == steps
        for before, after, one, other in zip(seen, seen[1:], found, found[1:], strict=False):
            assert (before == after) == (one == other or (np.isnan(one) and np.isnan(other)))


def test_an_optimizer_is_recorded_as_the_function_that_makes_it():
    shapes = {"up": {"kernel": (6, 8), "bias": (8,)}}
    one, other = (
        run(tx, shapes=shapes)[1]
        for tx in (
            recorded(omp.muonplus, every=2, measures=FEW)(0.1),
            recorded(omp.muonplus(0.1), every=2, measures=FEW),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)
    tx = omp.muonplus(0.1)
    assert recorded(tx, every=None) is tx


def test_what_updates_the_rest_may_have_a_momentum_too():
    momenta = optax.chain(omp.momentum(0.5), optax.scale_by_learning_rate(0.1))
    shapes = {"up": {"kernel": (6, 8), "bias": (8,)}}
    tx = omp.optimizer(omp.scale_by_muonplus(), 0.1, others=momenta)
    _, state = run(recorded(tx, every=2, measures=FEW), shapes=shapes)
    _, expected = run(recorded(omp.muonplus(0.1), every=2, measures=FEW), shapes=shapes)
    assert_records_close(read(state), read(expected), rtol=1e-6)
    two = omp.momentum(), omp.scale_by_muonplus()
    with pytest.raises(ValueError, match="a second momentum"):  # of the matrices there is one
        recorded(lambda: omp.matrix_chain(*two))()


def test_before_the_first_record_there_is_nan_and_step_minus_one():
    tx = recorded(omp.muonplus, every=10)(0.1, muon_weight_dimension_numbers=DIMS)
    record = read(tx.init(tree()))
    assert record.step == -1
    assert all(np.all(np.isnan(x)) for own in record.values.values() for x in own.values())
    assert record.values["experts/kernel"]["polar/rms"].shape == (2, 2, 3)
    assert record.values["fused/kernel"]["polar/rms"].shape == (3,)


def test_only_what_is_asked_for_is_recorded():
    made = recorded(omp.muonplus, every=1, only=["^up", "down/"], measures=["rms"])
    _, state = run(made(0.1, muon_weight_dimension_numbers=DIMS))
    values = read(state).values
    assert list(values) == ["down/weight", "up/kernel", "up2/kernel"]
    assert all(list(own) == ["momentum/rms", "polar/rms", "update/rms"] for own in values.values())
    assert [x.shape for x in jax.tree.leaves(state.values)] == [(3,)] * 3


def test_invalid_arguments_are_named():
    params = tree()
    near = r"only='up/kernle' matches no matrix. The nearest paths are up/kernel, up2/kernel"
    not_matrices = r"only='embed' matches embed/embedding, which are not matrices.*AdamW"
    for pattern, message in [("up/kernle", near), ("embed", not_matrices)]:
        tx = recorded(omp.muonplus, only=["up", pattern])(0.1, muon_weight_dimension_numbers=DIMS)
        with pytest.raises(ValueError, match=message):
            tx.init(params)
    with pytest.raises(ValueError, match=r"no matrix, and so no rows .* among bias \(3,\)"):
        recorded(omp.muonplus)(0.1).init({"bias": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"only='\(' must be regular expressions"):
        recorded(omp.muonplus, only="(")
    with pytest.raises(ValueError, match="chooses no matrix"):
        recorded(omp.muonplus, only=[])
    for wrong in ("rms", ["row_varience"]):
        with pytest.raises(ValueError, match=r"must be a sequence of names, of .'row_variance'"):
            recorded(omp.muonplus, measures=wrong, every=None)
    recorded(omp.muonplus, every=np.int64(3))
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match="must be a number of updates, None or 0 for never"):
            recorded(omp.muonplus, every=wrong)
    with pytest.raises(ValueError, match="wants an optimizer, or the function that makes one"):
        recorded(0.1)
    # The momentum is not that of the gradients.
    scaled = omp.matrix_chain(optax.scale(1e-3), omp.momentum(), omp.orthogonalize())
    for other in (
        lambda: recorded(optax.adamw)(0.1),
        lambda: recorded(optax.adamw(0.1)),
        lambda: recorded(omp.optimizer(scaled, 0.1)),
    ):
        with pytest.raises(ValueError, match=r"knows the inside of chains .*there is watched"):
            other()
    two = optax.chain(*[recorded(omp.muonplus)(0.1, muon_weight_dimension_numbers=DIMS)] * 2)
    for tx, count in [(two, 2), (optax.sgd(0.1), 0)]:
        with pytest.raises(ValueError, match=f"{count} recorders"):
            read(tx.init(params))


def after_one(grads, **options):
    """Updates and state of a recorder of FEW and distances after one update."""
    made = recorded(omp.muonplus, every=1, measures=(*FEW, "distance"))
    rules = [("fused", omp.MatrixSpec(0, 1, split_sizes=(16, 16, 16)))]
    dims = functools.partial(omp.muon_dimension_numbers, rules=rules)
    tx = made(0.1, muon_weight_dimension_numbers=dims, **options)
    return jax.jit(tx.update)(grads, jax.jit(tx.init)(grads), grads)


LARGE = {
    "up": {"kernel": (16, 32)},
    "up2": {"kernel": (16, 32), "bias": (32,)},
    "fused": {"kernel": (16, 48)},
}


@functools.cache
def of_one_device():
    return read(after_one(tree(1, shapes=LARGE))[1])


@pytest.mark.several_devices
@pytest.mark.parametrize("kind", ["given", "compiler", "explicit"])
def test_sharded_matrices_give_the_records_of_one_device(kind):
    """Eight devices; sums in another order, amplified by the iteration as above."""
    kinds = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)
    specs = {1: P("b"), 2: P("a", "b")}
    grads = tree(1, shapes=LARGE)
    places = jax.tree.map(lambda x: NamedSharding(mesh, specs[x.ndim]), grads)
    spread = jax.tree.map(jax.device_put, grads, places)
    given = {"sharding": places} if kind == "given" else {}
    with jax.set_mesh(mesh):
        updates, state = after_one(spread, **given)
        if kind == "compiler":  # a state that was read from a file has arrays of NumPy
            tx = recorded(omp.muonplus, every=1)(0.1)
            jax.jit(tx.update)(spread, jax.device_get(tx.init(spread)), spread)
    for x, place in zip(jax.tree.leaves(updates), jax.tree.leaves(places), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)
    assert_records_close(read(state), of_one_device(), rtol=1e-3)
